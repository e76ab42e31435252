// Definitions behind launch.hpp for CC 8.x, included by the instantiations only.
#pragma once

#include "cute_kernels/common/kernel_attributes.hpp"
#include "cute_kernels/matmul/launch_combine.hpp"
#include "cute_kernels/matmul/sm80/kernels.hpp"

namespace cute_kernels::matmul::sm80 {

// Calls f with the traits of a (dtype, N).
template <Role kRole, int kHeadDim, class F>
auto visit_traits(format::DType dtype, int n, F&& f) {
  auto visit_n = [&](auto element) {
    using Element = decltype(element);
    return n == 8 ? f(Traits<kRole, Element, kHeadDim, 8>{}) : f(Traits<kRole, Element, kHeadDim, 16>{});
  };
  return dtype == format::DType::kFloat16 ? visit_n(half_t{}) : visit_n(bfloat16_t{});
}

template <Role kRole, int kHeadDim>
KernelLimits limits(format::DType dtype, int n) {
  return visit_traits<kRole, kHeadDim>(dtype, n, [](auto traits) -> KernelLimits {
    using T = decltype(traits);
    if constexpr (T::kIsKey) return {T::kMaxWarps, 1, kMinStages, kMaxStages, logits_bytes<T>(), 0, false, 0, false};
    constexpr int kLastSegmentBytes = T::kMaxWarps * sizeof(int);
    return {T::kMaxWarps, 1, kMinStages, kMaxStages, share_bytes<T>() / kMinStages, kLastSegmentBytes, false, 0, false};
  });
}

template <class Kernel>
void launch_product(Kernel kernel, Params const& params, Config const& config, cudaStream_t stream) {
  int shared_bytes = config.workers * params.stages.count * params.stages.stage_bytes;
  allow_shared_bytes(kernel, shared_bytes);
  kernel<<<config.ctas, 32 * config.workers, shared_bytes, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of a product kernel");
}

template <Role kRole, int kHeadDim>
void launch(Params const& params, Config const& config, cudaStream_t stream) {
  visit_traits<kRole, kHeadDim>(params.sparse.dtype, config.n, [&](auto traits) {
    using T = decltype(traits);
    if constexpr (T::kIsKey) {
      launch_product(sparse_qk_kernel<T>, params, config, stream);
    } else {
      if (params.dense.dtype == params.sparse.dtype)
        launch_product(sparse_av_kernel<T, false>, params, config, stream);
      else
        launch_product(sparse_av_kernel<T, true>, params, config, stream);
      launch_combine<T>(params, config, config.workers, stream);
    }
  });
}

}  // namespace cute_kernels::matmul::sm80
