// How a product is laid over a device. Host code that tests call without a GPU.
//
// Decompression is limited by issue slots and shared-memory loads, which many warps fill better than deep pipelines do.
// So: as many warps as registers and shared memory allow with the fewest stages, then as many stages as still fit. An
// SM has four schedulers, so warps come in fours: one more than that is slower than four fewer (measured, 64 of 128
// kept: 11 warps 52.1 us, 8 warps 48.2 us; 38 kept: 15 warps 46.8 us, 12 warps 43.6 us).
//
// In a ring that all workers share, stages beyond one a worker are tiles under way. They must cover the latency of
// memory; more of them only make all arrive later (measured, 38 kept: sparse_qk 35.2 us with 32 stages for 16 workers,
// 34.9 with 24).
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cute_kernels/dispatch/tuning.hpp"
#include "cute_kernels/matmul/launch.hpp"

namespace cute_kernels::dispatch {

inline constexpr int kSchedulers = 4;  // of an SM, each issuing for a quarter of its warps

// Of a shared ring, beyond a stage a worker: workers are left out for so many bytes and, to have more producers, stages
// for no fewer than the minimum; more than the maximum are not used.
inline constexpr int kBytesAhead = 32 << 10, kMinStagesAhead = 2;
inline constexpr int kMaxProducers = 4;

inline constexpr int kMaxClusterLog2 = 4;  // 16 CTAs, more than every device must have

struct DeviceLimits {
  int multiprocessors;
  int shared_bytes;                            // a CTA may have, opt-in
  int major, minor;                            // compute capability
  bool programmatic_launch;                    // by the device and by the code built for it
  int max_clusters[kMaxClusterLog2 + 1] = {};  // of 2^i CTAs, one an SM, that run at a time
};

struct Plan {
  matmul::Config config;
  matmul::Stages stages;
};

// `dense_row_bytes`: of one row of p in a stage, 0 for keys. `tiles`: of all segments together. Throws
// std::runtime_error where there is no room for the stages that a kernel needs or that `tuning` asks for.
inline Plan choose_plan(DeviceLimits const& device, matmul::KernelLimits const& kernel, int n, int rows,
                        int max_tile_rows, int order_bytes, int dense_row_bytes, int64_t tiles,
                        Tuning const& tuning = {}) {
  Plan plan{};
  plan.config.n = n;
  plan.stages.block_bytes = std::max(max_tile_rows * format::kRowBytes, kernel.min_block_bytes);
  plan.stages.block_bytes = (plan.stages.block_bytes + 127) / 128 * 128;
  int behind = std::max(order_bytes + std::min(n, rows) * dense_row_bytes, format::kRowsBehind * format::kRowBytes);
  plan.stages.stage_bytes = (plan.stages.block_bytes + behind + 127) / 128 * 128;
  int fit = (device.shared_bytes - kernel.fixed_shared_bytes) / plan.stages.stage_bytes;  // stages of all workers
  if (fit < kernel.min_stages)
    throw std::runtime_error(std::to_string(kernel.min_stages) + " stages of " +
                             std::to_string(plan.stages.stage_bytes) + " bytes do not fit in the " +
                             std::to_string(device.shared_bytes) + " bytes of shared memory of this device");
  int room = std::min(fit, kernel.max_stages), asked = tuning.stages_ahead;
  if (asked >= room)
    throw std::runtime_error(std::to_string(asked) + " stages ahead: this kernel has room for " +
                             std::to_string(room - 1) + " here");
  auto in_fours = [&](int workers) {  // as far as warps go
    int unit = kSchedulers / kernel.worker_warps;
    return workers > unit ? workers - workers % unit : workers;
  };
  if (kernel.one_ring) {
    int ahead =
        std::clamp((kBytesAhead + plan.stages.stage_bytes - 1) / plan.stages.stage_bytes, 1, kernel.stages_ahead);
    plan.config.workers = in_fours(std::clamp(room - (asked ? asked : ahead), 1, kernel.max_workers));
  } else {
    int stages = asked ? asked + 1 : kernel.min_stages;
    plan.config.workers = in_fours(std::min(kernel.max_workers, fit / stages));
    plan.stages.count = asked ? stages : std::min(kernel.max_stages, fit / plan.config.workers);
  }
  // Thin work is spread over SMs first. No piece is empty: combine.hpp relies on it.
  plan.config.ctas = static_cast<int>(std::min<int64_t>(device.multiprocessors, tiles));
  plan.config.workers = static_cast<int>(std::min<int64_t>(plan.config.workers, tiles / plan.config.ctas));
  if (kernel.one_ring) {
    int workers = plan.config.workers, stages = std::min(room, workers + (asked ? asked : kernel.stages_ahead));
    auto usable = [&](int producers) { return stages - stages % producers; };  // they divide workers and stages
    int& producers = plan.config.producers = kMaxProducers;
    while (producers > 1 && (workers % producers != 0 || usable(producers) < workers + kMinStagesAhead)) --producers;
    plan.stages.count = usable(producers);
  }
  plan.config.cluster = 1;
  plan.config.programmatic_launch = device.programmatic_launch;
  return plan;
}

// Where it is about as even, cuts segments rather than the whole line into pieces, such that the CTAs of a cluster have
// all those of their segments: that saves partials and the kernel that adds them up, worth about kTilesOfCombine
// tiles of an SM.
inline constexpr int kTilesOfCombine = 8;

inline void cut_by_segments(DeviceLimits const& device, int segments, int tiles_per_segment, matmul::Config& config) {
  auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  int workers = config.workers;
  int64_t tiles = int64_t{segments} * tiles_per_segment, longest = ceil_div(tiles, int64_t{config.ctas} * workers);
  auto try_pieces = [&](int pieces, int cluster, int max_clusters) {
    int64_t ctas = int64_t{segments} * pieces / workers;
    bool fits = pieces <= tiles_per_segment && int64_t{segments} * pieces % workers == 0 &&
                ctas <= int64_t{max_clusters} * cluster && ceil_div(tiles_per_segment, pieces) <= longest + 1 &&
                ceil_div(tiles, ctas) <= ceil_div(tiles, config.ctas) + kTilesOfCombine;
    if (fits) config.segment_pieces = pieces, config.cluster = cluster, config.ctas = static_cast<int>(ctas);
    return fits;
  };
  for (int i = kMaxClusterLog2; i > 0; --i)
    if (try_pieces(workers << i, 1 << i, device.max_clusters[i])) return;
  for (int pieces = workers; pieces > 0; --pieces)
    if (workers % pieces == 0 && try_pieces(pieces, 1, device.multiprocessors)) return;
}

}  // namespace cute_kernels::dispatch
