// Definitions behind launch.hpp for CC 8.x, included by the instantiations only.
#pragma once

#include "cute_kernels/attention/launch_impl.hpp"
#include "cute_kernels/attention/sm80/kernel.hpp"

namespace cute_kernels::attention::sm80 {

template <int kHeadDim>
KernelLimits limits(format::DType dtype, int n) {
  return visit_traits<kHeadDim>(dtype, n, [](auto traits) -> KernelLimits {
    using T = decltype(traits);
    return {Storage<T>::kMaxWorkers, T::kWorkerWarps, kMinStages, kMaxStages, 0, kFixedBytes<T>, false, 0, false};
  });
}

template <int kHeadDim>
void launch(Params const& params, Config const& config, cudaStream_t stream) {
  visit_traits<kHeadDim>(params.keys.dtype, config.n, [&](auto traits) {
    using T = decltype(traits);
    launch_attention(attention_kernel<T>, params, config, T::kWorkerThreads * config.workers,
                     kFixedBytes<T> + config.workers * params.stages.count * params.stages.stage_bytes, stream);
    launch_combine<T>(params, config, stream);
  });
}

}  // namespace cute_kernels::attention::sm80
