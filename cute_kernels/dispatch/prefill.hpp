// Attention of many query rows: how the prefill kernel is laid over a device.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cute_kernels/common/device.hpp"
#include "cute_kernels/dispatch/tuning.hpp"
#include "cute_kernels/dispatch/vectors.hpp"
#include "cute_kernels/dispatch/workspace.hpp"
#include "cute_kernels/ops/attention/launch.hpp"
#include "cute_kernels/ops/attention/prefill/launch.hpp"
#include "cute_kernels/pipeline/launch.hpp"
#include "cute_kernels/reduce/merge_states.hpp"

namespace cute_kernels::dispatch {

// Whether keys and values have token orders of their own. That of exactly two of four is the order of memory.
inline bool has_separate_orders(attention::Problem const& problem) {
  return problem.keys.tile_format != format::TileFormatId::kTwoOfFour &&
         problem.keys.token_order != problem.values.token_order;
}

// KV tiles of the longest sequence, with the window's, as far as the host knows.
inline int longest_tiles(attention::Problem const& problem) {
  int64_t tokens = problem.keys.tokens, expected = problem.expected.longest;
  if (problem.lengths && expected > 0) tokens = std::min(expected, tokens);
  return static_cast<int>((tokens + problem.window.tokens + format::kTileTokens - 1) / format::kTileTokens);
}

// KV tiles an SM up to which 17 to 32 query rows are faster in the prefill kernel, which begins and ends sooner than a
// decoding kernel whose workers are warpgroups, as measured.
constexpr int few_tiles(int padded_head_dim) { return padded_head_dim < 128 ? 12 : 16; }

// Query rows of a KV head up to which the decoding kernels are faster, as measured. They alone have a depth to set by
// hand.
inline int most_decoding_rows(attention::Problem const& problem, DeviceLimits const& device, Tuning const& tuning) {
  format::SparseView const& keys = problem.keys;
  int rows = attention::max_rows(keys.padded_head_dim);
  bool is_narrow = format::is_narrow(keys.codec);
  if (keys.tile_format == format::TileFormatId::kTwoOfFour) return is_narrow ? 2 * rows : rows;
  if (is_narrow || has_separate_orders(problem)) return rows;
  int64_t tiles = int64_t{problem.batch} * keys.kv_heads * longest_tiles(problem);
  bool has_few = tiles <= int64_t{few_tiles(keys.padded_head_dim)} * device.multiprocessors;
  if (has_few && tuning.stages_ahead == 0) return rows;
  return std::max(rows, attention::max_warpgroup_rows(keys.padded_head_dim));
}

// Into how many splits a KV head's tokens are cut, such that the CTAs of all work tiles fill the SMs: the last of them
// to end does so soonest. Costs in KV tiles of a CTA: what it does beside its own; merging splits, by their CTAs where
// merges(splits) says so, or by a kernel, for any and for every split.
namespace prefill_cost {
inline constexpr float kCta = 6, kCluster = 2, kClusterCta = 0.5f, kMerge = 5, kMergedSplit = 0.25f;
}  // namespace prefill_cost
inline constexpr int kMaxPrefillSplits = 64;

template <class F>
int prefill_splits(int multiprocessors, int64_t work_tiles, int tiles, int most, F&& merges) {
  most = std::min({most, kMaxPrefillSplits, std::max(tiles, 1)});
  auto of_merge = [&](int splits) {
    auto count = static_cast<float>(splits);
    if (splits == 1) return 0.f;
    return merges(splits) ? prefill_cost::kCluster + prefill_cost::kClusterCta * count
                          : prefill_cost::kMerge + prefill_cost::kMergedSplit * count;
  };
  auto cost = [&](int splits) {
    int64_t waves = (work_tiles * splits + multiprocessors - 1) / multiprocessors;
    auto of_cta = static_cast<float>((tiles + splits - 1) / splits);
    return static_cast<float>(waves) * (of_cta + prefill_cost::kCta) + of_merge(splits);
  };
  int best = 1;
  for (int splits = 2; splits <= most; ++splits)
    if (cost(splits) < cost(best)) best = splits;
  return best;
}

// Stages of a decoder that fit; none: the device's shared memory does not suffice.
inline int prefill_stages(attention::prefill::Limits const& limits, int stage_bytes, DeviceLimits const& device) {
  int fit = (device.shared_bytes - limits.fixed_shared_bytes) / (stage_bytes * limits.decoders);
  return std::max(0, std::min(fit, limits.max_block_stages));
}

// Of the variants whose stages fit, the smallest that takes all query rows at once, or the one with the fewest passes over
// the KV tiles; of equal ones the smaller. std::runtime_error if there is none.
template <class Launcher>
attention::prefill::Variant choose_variant(int rows, format::SparseView const& keys, int stage_bytes,
                                           DeviceLimits const& device) {
  auto passes = [&](attention::prefill::Variant variant) { return (rows + variant.rows() - 1) / variant.rows(); };
  attention::prefill::Variant const* best = nullptr;
  for (attention::prefill::Variant const& variant : Launcher::kVariants) {
    if (prefill_stages(Launcher::limits(keys, variant), stage_bytes, device) == 0) continue;
    if (!best || passes(variant) < passes(*best)) best = &variant;
  }
  if (!best)
    throw std::runtime_error("tiles of " + std::to_string(stage_bytes) + " bytes do not fit in the " +
                             std::to_string(device.shared_bytes) + " bytes of shared memory of this device");
  return *best;
}

// Launcher: of attention::prefill.
template <class Launcher>
void run_prefill(attention::Problem const& problem, Workspace const& workspace, DeviceLimits const& device,
                 cudaStream_t stream) {
  namespace prefill = attention::prefill;
  format::SparseView const &keys = problem.keys, &values = problem.values;
  prefill::Params params{};
  static_cast<attention::Problem&>(params) = problem;
  params.group = problem.q_heads / keys.kv_heads;
  params.rows = params.group * problem.q_tokens;
  int block_bytes = std::max(keys.max_tile_rows, values.max_tile_rows) * format::kRowBytes;
  int rows_behind = format::visit_codec(keys.codec, [](auto codec) { return decltype(codec)::kRowsBehind; });
  int behind = std::max(2 * prefill::kOrderBytes, rows_behind * format::kRowBytes);
  params.stage_bytes = (block_bytes + behind + 127) / 128 * 128;
  prefill::Variant variant = choose_variant<Launcher>(params.rows, keys, params.stage_bytes, device);
  int row_blocks = (params.rows + variant.rows() - 1) / variant.rows();
  params.query_tokens = cutlass::FastDivmod(problem.q_tokens);
  params.row_blocks = cutlass::FastDivmod(row_blocks);
  params.kv_heads = cutlass::FastDivmod(keys.kv_heads);
  params.separate_orders = has_separate_orders(problem);
  params.zero_masked = problem.lengths && !keys.pages.table;  // sequences in pages end with a tile

  params.q_vectorized = in_vectors(problem.q, problem.q_strides);
  params.window_vectorized = in_vectors(problem.window);
  prefill::Limits limits = Launcher::limits(keys, variant);
  params.block_stages = prefill_stages(limits, params.stage_bytes, device);

  int64_t heads = int64_t{problem.batch} * keys.kv_heads, ctas = heads * row_blocks * variant.cluster_ctas,
          work_tiles = ctas;
  if (problem.packed.starts) {  // those that have query tokens, at most
    int64_t rows = int64_t{params.group} * problem.packed.tokens;
    work_tiles = std::min(ctas, (problem.batch + rows / variant.rows()) * variant.cluster_ctas * keys.kv_heads);
  }
  int tiles = longest_tiles(problem);
  int most = problem.num_splits > 0 ? problem.num_splits : kMaxPrefillSplits;
  // In clusters, if all of them run at a time; larger ones are no faster than the kernel that merges.
  auto merges = [&](int splits) {
    return variant.cluster_ctas == 1 && splits > 1 && splits <= pipeline::kPortableCluster &&
           ctas <= device.max_clusters[splits];
  };
  int splits = prefill_splits(device.multiprocessors, work_tiles, tiles, most, merges);
  if (ctas * splits > INT32_MAX)
    throw std::runtime_error("the call has more than 2^31 blocks of query rows; split the batch");
  params.splits = cutlass::FastDivmod(splits);
  params.merges = merges(splits);
  int64_t out_rows = params.all_rows();
  bool has_partials = splits > 1 && !params.merges;
  if (has_partials) {
    int64_t out_bytes = splits * out_rows * keys.head_dim * static_cast<int64_t>(sizeof(float));
    params.partial_out = workspace(out_bytes + splits * out_rows * static_cast<int64_t>(sizeof(float)));
    params.partial_lse = reinterpret_cast<float*>(static_cast<char*>(params.partial_out) + out_bytes);
  }
  Launcher::launch(params, variant, static_cast<int>(ctas * splits),
                   limits.fixed_shared_bytes + limits.decoders * params.block_stages * params.stage_bytes, stream);
  if (has_partials)
    reduce::merge_states({params.partial_out, params.partial_lse, out_rows * keys.head_dim, out_rows, problem.out,
                          problem.lse, splits, out_rows, keys.head_dim, DType::kFloat32, keys.dtype},
                         stream);
}

}  // namespace cute_kernels::dispatch
