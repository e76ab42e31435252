// How a kernel is laid over a device. Host code that tests call without a GPU.
//
// Decoding is limited by issue slots and shared-memory loads, which many warps fill better than deep pipelines do. So:
// as many warps as registers and shared memory allow with the fewest stages, then as many stages as still fit. An SM
// has four schedulers, so warps come in fours: one more than that is slower than four fewer.
//
// In a ring that all workers share, stages beyond one a worker are filled ahead of them, which must cover the latency
// of memory.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cute_kernels/common/device.hpp"
#include "cute_kernels/dispatch/tuning.hpp"
#include "cute_kernels/pipeline/config.hpp"

namespace cute_kernels::dispatch {

inline constexpr int kSchedulers = 4;  // of an SM, each issuing for a quarter of its warps

// Of a shared ring, beyond a stage a worker: workers are left out for so many bytes and, to have more producers, stages
// for no fewer than the minimum; more than the maximum are not used.
inline constexpr int kBytesAhead = 32 << 10, kMinStagesAhead = 2;

struct Plan {
  pipeline::Config config;
  pipeline::Stages stages;
};

// `dense_row_bytes`: of one row of p in a stage, 0 for keys. `tiles`: KV tiles of all work tiles together. Throws
// std::runtime_error where the stages do not fit that a kernel needs or that `tuning` asks for.
inline Plan choose_plan(DeviceLimits const& device, pipeline::KernelLimits const& kernel, int n, int rows,
                        int max_tile_rows, int order_bytes, int dense_row_bytes, int64_t tiles,
                        Tuning const& tuning = {}) {
  Plan plan{};
  plan.config.n = n;
  plan.stages.block_bytes = std::max(max_tile_rows * format::kRowBytes, kernel.min_block_bytes);
  plan.stages.block_bytes = (plan.stages.block_bytes + 127) / 128 * 128;
  int behind = std::max(order_bytes + std::min(n, rows) * dense_row_bytes, kernel.rows_behind * format::kRowBytes);
  plan.stages.stage_bytes = (plan.stages.block_bytes + behind + 127) / 128 * 128;
  int fit = (device.shared_bytes - kernel.fixed_shared_bytes) / plan.stages.stage_bytes;  // stages of all workers
  if (fit < kernel.min_stages)
    throw std::runtime_error(std::to_string(kernel.min_stages) + " stages of " +
                             std::to_string(plan.stages.stage_bytes) + " bytes do not fit in the " +
                             std::to_string(device.shared_bytes) + " bytes of shared memory of this device");
  int most_stages = std::min(fit, kernel.max_stages), asked = tuning.stages_ahead;
  if (asked >= most_stages)
    throw std::runtime_error(std::to_string(asked) + " stages ahead: at most " + std::to_string(most_stages - 1) +
                             " fit this kernel here");
  auto in_fours = [&](int workers) {  // as far as warps go
    int step = kSchedulers / kernel.worker_warps;
    return workers > step ? workers - workers % step : workers;
  };
  if (kernel.one_ring) {
    int ahead =
        std::clamp((kBytesAhead + plan.stages.stage_bytes - 1) / plan.stages.stage_bytes, 1, kernel.stages_ahead);
    plan.config.workers = in_fours(std::clamp(most_stages - (asked ? asked : ahead), 1, kernel.max_workers));
  } else {
    int stages = asked ? asked + 1 : kernel.min_stages;
    plan.config.workers = in_fours(std::min(kernel.max_workers, fit / stages));
    plan.stages.count = asked ? stages : std::min(kernel.max_stages, fit / plan.config.workers);
  }
  // Thin work is spread over SMs first, then over as many workers as a CTA has tiles.
  int64_t ctas = std::min<int64_t>(device.multiprocessors, tiles);
  plan.config.ctas = static_cast<int>(ctas);
  if (tiles < ctas * plan.config.workers) {
    int workers = static_cast<int>(tiles / ctas);
    if (kernel.whole_steps && workers > pipeline::kMaxProducers) workers = in_fours(workers);
    plan.config.workers = std::min(plan.config.workers, workers);
  }
  if (kernel.one_ring) {
    int workers = plan.config.workers, stages = std::min(most_stages, workers + (asked ? asked : kernel.stages_ahead));
    auto usable = [&](int producers) { return stages - stages % producers; };  // they divide workers and stages
    int& producers = plan.config.producers = pipeline::kMaxProducers;
    while (producers > 1 && (workers % producers != 0 || usable(producers) < workers + kMinStagesAhead)) --producers;
    plan.stages.count = usable(producers);
  }
  plan.config.cluster = 1;
  plan.config.summed_splits = kernel.sums_in_cta ? plan.config.workers : 0;
  plan.config.programmatic_launch = device.programmatic_launch;
  return plan;
}

// How many tiles of a product are in flight, as many for each producer; none where workers fill their own stages.
//   first  one a producer, so that decoding begins soon; or two, which keep memory busier, where two of these hold: tiles
//          are small, they are of values, workers' splits together have many
//   later  about kBytesInFlight, since more of large tiles come more slowly, and no fewer than first
inline constexpr int kBytesInFlight = 72 << 10, kManyTiles = 17;

inline pipeline::TilesInFlight tiles_in_flight(Plan const& plan, format::Role role, int padded_head_dim,
                                               int longest_split) {
  int stages = plan.stages.count, bytes = plan.stages.stage_bytes, producers = plan.config.producers;
  if (producers == 0) return {};
  bool small = padded_head_dim <= 64, value = role == format::Role::kValue;
  bool many = plan.config.workers * longest_split >= kManyTiles;
  int first = (small + value + many >= 2 ? 2 : 1) * producers;
  int later = std::max(first, (kBytesInFlight / bytes + producers / 2) / producers * producers);
  return {first, later < stages ? later : 0};
}

// Where it is about as even, partitions every work tile rather than the whole schedule, such that the CTAs of a cluster
// have all splits of their work tiles: that saves partials and the kernel that combines them, worth about
// kTilesOfCombine tiles of an SM. Returns whether it did. longest: tiles of the longest work tile; tiles: of all of them.
inline constexpr int kTilesOfCombine = 8;

inline bool partition_in_clusters(DeviceLimits const& device, int work_tiles, int longest, int64_t tiles,
                                  pipeline::Config& config) {
  auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  int workers = config.workers;
  int64_t even = ceil_div(tiles, int64_t{config.ctas} * workers);  // tiles of a split of the whole schedule
  auto try_splits = [&](int splits, int cluster, int max_clusters) {
    int64_t ctas = int64_t{work_tiles} * splits / workers;
    bool fits = splits <= longest && int64_t{work_tiles} * splits % workers == 0 &&
                ctas <= int64_t{max_clusters} * cluster && ceil_div(longest, splits) <= even + 1 &&
                ceil_div(int64_t{work_tiles} * longest, ctas) <= ceil_div(tiles, config.ctas) + kTilesOfCombine;
    if (fits) config.splits_per_work_tile = splits, config.cluster = cluster, config.ctas = static_cast<int>(ctas);
    return config.in_cluster = fits;
  };
  for (int cluster = kMaxCluster; cluster > 1; cluster /= 2)
    if (try_splits(workers * cluster, cluster, device.max_clusters[cluster])) return true;
  for (int splits = workers; splits > 0; --splits)
    if (workers % splits == 0 && try_splits(splits, 1, device.multiprocessors)) return true;
  return false;
}

}  // namespace cute_kernels::dispatch
