// What the launchers of the products on CC 8.x share.
#pragma once

#include "cute_kernels/common/kernel_attributes.hpp"
#include "cute_kernels/mma/warp/traits.hpp"
#include "cute_kernels/ops/product/sm80/warp_pipeline.hpp"

namespace cute_kernels::product::sm80 {

// Narrow codecs have fewer kernels: more rows take more passes.
template <class Codecs>
inline constexpr int kMaxRows = mma::kHaveFewKernels<Codecs> ? 8 : 16;

// Calls f with the traits of a (codec, N).
template <format::Role kRole, int kHeadDim, class Codecs, class F>
auto visit_traits(format::CodecId codec, int n, F&& f) {
  return mma::visit_stored_operand<Codecs>(codec, [&](auto stored) {
    using Stored = decltype(stored);
    if constexpr (kMaxRows<Codecs> == 16) {
      if (n == 16) return f(mma::WarpTraits<kRole, Stored, kHeadDim, 16>{});
    }
    return f(mma::WarpTraits<kRole, Stored, kHeadDim, 8>{});
  });
}

// result_bytes: that a stage takes when its tile has been multiplied. reduces: partials, which takes all warps.
template <class Traits>
pipeline::KernelLimits limits(int result_bytes, bool reduces) {
  pipeline::KernelLimits limits{};
  limits.max_workers = Traits::kMaxWarps;
  limits.worker_warps = 1;
  limits.rows_behind = Traits::Decoder::kRowsBehind;
  limits.min_stages = pipeline::kMinCpAsyncStages;
  limits.max_stages = pipeline::kMaxCpAsyncStages;
  limits.min_block_bytes = result_bytes;
  limits.sums_in_cta = reduces;
  return limits;
}

template <class OperationParams>
void launch(void (*kernel)(OperationParams), OperationParams const& params, pipeline::Config const& config,
            cudaStream_t stream) {
  int shared_bytes = config.workers * params.stages.count * params.stages.stage_bytes;
  allow_shared_bytes(kernel, shared_bytes);
  kernel<<<config.ctas, 32 * config.workers, shared_bytes, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of a product kernel");
}

}  // namespace cute_kernels::product::sm80
