// How a product is laid over a device. Host code that tests call without a GPU.
//
// Decompression is limited by issue slots and shared-memory loads, which many warps fill better than deep pipelines do.
// So: as many warps as registers and shared memory allow with the fewest stages, then as many stages as still fit. An
// SM has four schedulers, so warps come in fours: one more than that is slower than four fewer (measured, 64 of 128
// kept: 11 warps 52.1 us, 8 warps 48.2 us; 38 kept: 15 warps 46.8 us, 12 warps 43.6 us).
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cute_kernels/matmul/launch.hpp"

namespace cute_kernels::dispatch {

inline constexpr int kSchedulers = 4;  // of an SM, each issuing for a quarter of its warps

struct DeviceLimits {
  int multiprocessors;
  int shared_bytes;          // a CTA may have, opt-in
  int major, minor;          // compute capability
  bool programmatic_launch;  // by the device and by the code built for it
};

struct Plan {
  matmul::Config config;
  matmul::Stages stages;
};

// `dense_row_bytes`: of one row of p in a stage, 0 for keys. `tiles`: of all segments together.
inline Plan choose_plan(DeviceLimits const& device, matmul::KernelLimits const& kernel, int n, int rows,
                        int max_tile_rows, int order_bytes, int dense_row_bytes, int64_t tiles) {
  Plan plan{};
  plan.config.n = n;
  plan.stages.block_bytes = std::max(max_tile_rows * format::kRowBytes, kernel.min_block_bytes);
  plan.stages.block_bytes = (plan.stages.block_bytes + 127) / 128 * 128;
  plan.stages.stage_bytes =
      (plan.stages.block_bytes + order_bytes + std::min(n, rows) * dense_row_bytes + 127) / 128 * 128;
  int fit = (device.shared_bytes - kernel.fixed_shared_bytes) / plan.stages.stage_bytes;  // stages of all workers
  if (fit < kernel.min_stages)
    throw std::runtime_error(std::to_string(kernel.min_stages) + " stages of " +
                             std::to_string(plan.stages.stage_bytes) + " bytes do not fit in the " +
                             std::to_string(device.shared_bytes) + " bytes of shared memory of this device");
  auto in_fours = [&](int workers) {  // as far as warps go
    int unit = kSchedulers / kernel.worker_warps;
    return workers > unit ? workers - workers % unit : workers;
  };
  plan.config.workers = in_fours(std::min(kernel.max_workers, fit / kernel.min_stages));
  plan.stages.count = std::min(kernel.max_stages, fit / plan.config.workers);
  // Thin work is spread over SMs first. No piece is empty: combine.hpp relies on it.
  plan.config.ctas = static_cast<int>(std::min<int64_t>(device.multiprocessors, tiles));
  plan.config.workers = static_cast<int>(std::min<int64_t>(plan.config.workers, tiles / plan.config.ctas));
  plan.config.programmatic_launch = device.programmatic_launch;
  return plan;
}

}  // namespace cute_kernels::dispatch
