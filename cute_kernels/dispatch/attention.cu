#include "cute_kernels/dispatch/attention.hpp"
#include "cute_kernels/dispatch/division.hpp"
#include "cute_kernels/dispatch/heuristics.hpp"
#include "cute_kernels/dispatch/kernels.hpp"
#include "cute_kernels/dispatch/prefill.hpp"
#include "cute_kernels/dispatch/vectors.hpp"
#include "cute_kernels/schedule/schedule.hpp"

namespace cute_kernels::dispatch {
namespace {

using attention::Params;

struct WindowAccess {
  bool vectorized, staged;
};

// Window tiles are addressed by 32 bits.
void check_window(attention::Window const& window) {
  auto reach = [&](int64_t const* strides) { return int64_t{window.tokens} * strides[2]; };
  if (reach(window.key_strides) > INT32_MAX || reach(window.value_strides) > INT32_MAX)
    throw std::runtime_error("the tokens of a window lie 2^31 elements apart or more; pass a contiguous one");
}

// How a window may be read: see Params.
WindowAccess window_access(attention::Problem const& problem) {
  attention::Window const& window = problem.window;
  int head_dim = problem.keys.head_dim;
  bool vectorized = head_dim % 8 == 0 && in_vectors(window);
  bool contiguous = window.key_strides[2] == head_dim && window.value_strides[2] == head_dim;
  return {vectorized, vectorized && contiguous};
}

// All of the schedule but its partition. Returns the cost of all work tiles.
int64_t describe_work(attention::Problem const& problem, int row_blocks, schedule::Params& schedule) {
  format::SparseView const& keys = problem.keys;
  schedule.batch = problem.batch;
  schedule.kv_heads = keys.kv_heads;
  schedule.tokens = static_cast<int>(keys.tokens);
  schedule.window_tokens = problem.window.tokens;
  schedule.sequences = problem.sequences;
  schedule.lengths = problem.lengths;
  schedule.window_lengths = problem.window.lengths;
  schedule.variable_length = problem.lengths || (problem.window.tokens > 0 && problem.window.lengths);
  int64_t tiles = schedule::kv_tiles_of(keys.tokens, problem.window.tokens);
  int64_t cost = tiles + schedule::attention_work_tile_cost(schedule.variable_length);
  int64_t all = int64_t{problem.batch} * keys.kv_heads * row_blocks * cost;
  if (all > INT32_MAX / 2) throw std::runtime_error("the call has more than 2^30 tiles of work; split the batch");
  schedule.tiles_per_work_tile = cutlass::FastDivmod(static_cast<int>(tiles));
  schedule.cost_per_work_tile = cutlass::FastDivmod(static_cast<int>(cost));
  schedule.work_tiles_per_row = cutlass::FastDivmod(keys.kv_heads * row_blocks);
  schedule.row_blocks = cutlass::FastDivmod(row_blocks);
  return all;
}

// Cuts the work into the splits of a configuration. cost: of all work tiles; longest: KV tiles of the longest work tile,
// where lengths are on the device as expected.
void partition_work(pipeline::Config const& config, int64_t cost, int longest, schedule::Params& schedule) {
  schedule.workers = config.workers;
  schedule.by_work_tile = config.splits_per_work_tile > 0;
  schedule.in_cluster = config.in_cluster;
  int splits = schedule.by_work_tile ? config.splits_per_work_tile : config.ctas * config.workers;
  schedule.splits = cutlass::FastDivmod(splits);
  int total = schedule.by_work_tile ? longest : static_cast<int>(cost);
  int lead = schedule.by_work_tile ? schedule::window_lead(schedule.window_tokens, longest / splits) : 0;
  schedule.partition = schedule::make_partition(total, schedule.splits, lead);
  schedule.longest_split = schedule.partition.longest();
}

// Compressed tiles that a plan is made for: all, or those that the host expects where lengths are on the device.
struct ExpectedTiles {
  bool known;
  int64_t longest, all;  // of the longest work tile, and of all of them together

  ExpectedTiles(attention::Problem const& problem, schedule::Params const& schedule) {
    attention::ExpectedLengths const& expected = problem.expected;
    known = !schedule.variable_length || expected.longest > 0;
    bool all_count = !schedule.variable_length || !known;
    longest = schedule::tiles_of(all_count ? schedule.tokens : std::min(expected.longest, schedule.tokens));
    all = all_count ? schedule.work_tiles() * longest
                    : schedule.work_tiles_per_row.divisor * schedule::tiles_of(expected.sum);
  }
};

void run_with(Kernels<Params> const& kernels, attention::Problem const& problem, Workspace const& workspace,
              DeviceLimits const& device, Tuning const& tuning, cudaStream_t stream) {
  format::SparseView const &keys = problem.keys, &values = problem.values;
  Params params{};
  static_cast<attention::Problem&>(params) = problem;
  constexpr float kLog2E = 1.44269504088896f;
  params.scale_log2 = problem.scale * kLog2E;
  params.group = problem.q_heads / keys.kv_heads;
  params.query_tokens = cutlass::FastDivmod(problem.q_tokens);
  schedule::Params& schedule = params.schedule;
  schedule.rows = params.group * problem.q_tokens;
  int n = kernels.rows_per_pass(schedule.rows), row_blocks = (schedule.rows + n - 1) / n;
  int64_t cost = describe_work(problem, row_blocks, schedule);
  params.separate_orders = has_separate_orders(problem);
  params.zero_masked = problem.lengths && !keys.pages.table;  // sequences in pages end with a tile
  params.uniform = !schedule.variable_length && !params.separate_orders && !keys.pages.table && !problem.sequences &&
                   !problem.packed.starts;

  pipeline::KernelLimits limits = kernels.launcher.limits(keys.codec, n);
  params.schedule_bytes = schedule::shared_bytes(schedule.variable_length, problem.batch);
  limits.fixed_shared_bytes += params.schedule_bytes;
  ExpectedTiles expected(problem, schedule);
  WindowAccess access = window_access(problem);
  params.window_vectorized = access.vectorized;
  bool has_window = problem.window.tokens > 0;
  // Work tiles without any token read an empty stage too.
  params.window_staged = !has_window || access.staged;
  if (has_window) {
    int bytes = schedule::kWindowTileTokens * attention::window_row_elements(keys.head_dim) * 2;
    limits.min_block_bytes = std::max(limits.min_block_bytes, bytes);
  }
  int64_t work_tiles = schedule.work_tiles(), window_tiles = schedule::window_tiles_of(problem.window.tokens);
  int64_t tiles = std::max(work_tiles, expected.all + work_tiles * window_tiles);
  auto plan_with = [&](int64_t tiles) {
    return choose_plan(device, limits, n, schedule.rows, std::max(keys.max_tile_rows, values.max_tile_rows),
                       attention::stage_extra_bytes(keys.channel_scale != nullptr), 0, tiles, tuning);
  };
  int longest = static_cast<int>(std::max<int64_t>(1, expected.longest + window_tiles));
  bool divides = limits.combines_in_cluster && expected.known && problem.num_splits == 0;
  Plan plan = plan_with(divides ? INT32_MAX : tiles);
  if (problem.num_splits > 0)
    plan.config.ctas = static_cast<int>(std::min<int64_t>(plan.config.ctas, problem.num_splits * work_tiles));
  if (divides) {
    int vectors = (keys.padded_head_dim * n / 16) << reduce::partial_vectors(schedule.rows).pairs_log2;
    int worker_threads = 32 * limits.worker_warps;
    Work work{static_cast<int>(work_tiles),
              longest,
              tiles,
              vectors,
              keys.padded_head_dim,
              n,
              plan.config.workers,
              worker_threads,
              schedule.variable_length};
    Division division = choose_division(device, work);
    limits.max_workers = division.workers;
    plan = plan_with(INT32_MAX);
    plan.config.ctas = division.ctas;
    plan.config.cluster = division.cluster;
    plan.config.splits_per_work_tile = division.splits_per_work_tile;
    plan.config.in_cluster = division.in_cluster;
  }
  plan.config.in_flight = {plan.config.workers, 0};  // if in a ring: each worker's first tile of keys, then all
  partition_work(plan.config, cost, longest, schedule);
  params.stages = plan.stages;
  params.output.out = problem.out;
  params.output.lse = problem.lse;
  params.output.dtype = values.dtype;
  params.output.channel_order = values.channel_order;
  params.output.order_heads = values.order_heads;
  params.output.head_dim = values.head_dim;
  params.output.packed = problem.packed;
  params.output.query_tokens = params.query_tokens;
  params.output.vectors = reduce::partial_vectors(schedule.rows);
  if (!schedule.in_cluster) {
    int64_t partials = reduce::place_partials(schedule, plan.config.summed_splits, params.output);
    params.output.partials = workspace(partials * attention::partial_bytes(n, keys.padded_head_dim));
  }
  kernels.launcher.launch(params, plan.config, stream);
}

}  // namespace

bool has_prefill_kernel(format::CodecId codec, format::TileFormatId tile_format) {
  return mma::visit_codecs(tile_format, codec, [&](auto codecs) {
    using Codecs = decltype(codecs);
    return format::is_narrow(codec) ? mma::kHavePrefillOfNarrow<Codecs, half_t> : mma::kHavePrefillOfHalf<Codecs>;
  });
}

void run(attention::Problem const& problem, Workspace const& workspace, std::string const& backend,
         Tuning const& tuning, cudaStream_t stream) {
  DeviceLimits device = current_device();
  if (problem.values.codec != problem.keys.codec)
    throw std::runtime_error(std::string("GPU kernels take keys and values in one codec, not ") +
                             format::codec_name(problem.keys.codec) + " and " +
                             format::codec_name(problem.values.codec));
  if (problem.values.tile_format != problem.keys.tile_format)
    throw std::runtime_error(std::string("GPU kernels take keys and values in one tile format, not ") +
                             format::tile_format_name(problem.keys.tile_format) + " and " +
                             format::tile_format_name(problem.values.tile_format));
  check_window(problem.window);
  visit_backend(backend, problem.keys.padded_head_dim, device, [&](auto kernels) {
    using Backend = decltype(kernels);
    if constexpr (Backend::kHasPrefill) {
      int rows = problem.q_heads / problem.keys.kv_heads * problem.q_tokens;
      format::SparseView const& keys = problem.keys;
      if (has_prefill_kernel(keys.codec, keys.tile_format) && rows > most_decoding_rows(problem, device, tuning)) {
        if (tuning.stages_ahead > 0)
          throw std::runtime_error("no stages ahead can be chosen for " + std::to_string(rows) +
                                   " query rows a KV head, which the prefill kernel takes");
        return mma::visit_codecs(problem.keys, [&](auto codecs) {
          run_prefill<typename Backend::template Prefill<decltype(codecs)>>(problem, workspace, device, stream);
        });
      }
    }
    run_with(decltype(kernels)::attention_kernels(problem.keys), problem, workspace, device, tuning, stream);
  });
}

}  // namespace cute_kernels::dispatch
