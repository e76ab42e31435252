// What the launchers of the products on CC 9.0 share.
#pragma once

#include "cute_kernels/mma/warp/traits.hpp"
#include "cute_kernels/ops/product/sm90/warp_pipeline.hpp"
#include "cute_kernels/ops/product/sm90/warpgroup_worker.hpp"
#include "cute_kernels/pipeline/launch.hpp"

namespace cute_kernels::product::sm90 {

// Narrow codecs have fewer kernels: more rows take more passes.
template <class Codecs>
inline constexpr int kMaxRows = mma::kHaveFewKernels<Codecs> ? 8 : 64;

// Calls f with the traits of a (codec, N): a warp multiplies up to 16 rows with mma.sync, a warpgroup more with WGMMA.
template <format::Role kRole, int kHeadDim, class Codecs, class F>
auto visit_traits(format::CodecId codec, int n, F&& f) {
  return mma::visit_stored_operand<Codecs>(codec, [&](auto stored) {
    using Stored = decltype(stored);
    if constexpr (kMaxRows<Codecs> == 64) {
      if (n == 16) return f(mma::WarpTraits<kRole, Stored, kHeadDim, 16>{});
      if (n == 32) return f(mma::WarpgroupTraits<kRole, Stored, kHeadDim, 32>{});
      if (n == 64) return f(mma::WarpgroupTraits<kRole, Stored, kHeadDim, 64>{});
    }
    return f(mma::WarpTraits<kRole, Stored, kHeadDim, 8>{});
  });
}

template <class Traits>
inline constexpr bool kByWarps = Traits::kN <= 16;

// result_bytes: that a stage takes when its tile has been multiplied, or, of the stages, which are no fewer than
// workers, a worker when all have been. reduces: partials, which takes all workers.
template <class Traits>
pipeline::KernelLimits warp_limits(int result_bytes, bool reduces) {
  pipeline::KernelLimits limits{};
  limits.max_workers = kMaxWarpgroups<Traits> * kWarpgroupWarps;
  limits.worker_warps = 1;
  limits.rows_behind = Traits::Decoder::kRowsBehind;
  limits.min_stages = 2;
  limits.max_stages = pipeline::kMaxStages;
  limits.min_block_bytes = result_bytes;
  limits.fixed_shared_bytes = kWarpFixedBytes;
  limits.one_ring = true;
  limits.stages_ahead = kStagesAhead;
  limits.whole_steps = true;
  limits.combines_in_cluster = limits.sums_in_cta = reduces;
  static_assert(kMaxWarpgroups<Traits> * kWarpgroupWarps <= schedule::kMaxWorkers);
  return limits;
}

template <class Traits, class Storage>
pipeline::KernelLimits warpgroup_limits() {
  pipeline::KernelLimits limits{};
  limits.max_workers = Traits::kMaxWarpgroups;
  limits.worker_warps = kWarpgroupWarps;
  limits.min_stages = 2;
  limits.max_stages = pipeline::kMaxStages;
  limits.fixed_shared_bytes = kWarpgroupsFixedBytes<Traits, Storage>;
  limits.one_ring = true;
  limits.stages_ahead = kStagesAhead;
  return limits;
}

// params: a pipeline::RingParams.
template <class KernelParams>
void launch(void (*kernel)(KernelParams), KernelParams const& params, pipeline::Config const& config,
            int worker_threads, int fixed_bytes, cudaStream_t stream) {
  using pipeline::kWarpgroupThreads;
  int warpgroups = (config.workers * worker_threads + kWarpgroupThreads - 1) / kWarpgroupThreads;
  pipeline::launch_clusters(kernel, params, config, (warpgroups + 1) * kWarpgroupThreads,
                            fixed_bytes + params.stages.count * params.stages.stage_bytes, false, stream);
}

}  // namespace cute_kernels::product::sm90
