// Definitions behind launch.hpp for CC 9.0, included by the instantiations only.
#pragma once

#include "cute_kernels/attention/launch_impl.hpp"
#include "cute_kernels/attention/sm90/kernel.hpp"

namespace cute_kernels::attention::sm90 {

template <int kHeadDim>
KernelLimits limits(format::DType dtype, int n) {
  return visit_traits<kHeadDim>(dtype, n, [](auto traits) -> KernelLimits {
    using T = decltype(traits);
    constexpr int kMaxWorkers = Storage<T>::kMaxWorkers;
    constexpr int kMaxStagesEach =
        kMaxStages / kMaxWorkers < kMaxStagesOfWorker ? kMaxStages / kMaxWorkers : kMaxStagesOfWorker;
    return {kMaxWorkers,    T::kWorkerWarps, kMinStages, kMaxStagesEach, min_block_bytes<T>(kMinStages),
            kFixedBytes<T>, false,           false};
  });
}

template <int kHeadDim>
void launch(Params const& params, Config const& config, cudaStream_t stream) {
  visit_traits<kHeadDim>(params.keys.dtype, config.n, [&](auto traits) {
    using T = decltype(traits);
    int warpgroups = (config.workers * T::kWorkerWarps + kWarpgroupWarps - 1) / kWarpgroupWarps;
    launch_attention(attention_kernel<T>, params, config, (warpgroups + 1) * kWarpgroupThreads, kFixedBytes<T>, stream);
    launch_combine<T>(params, config, stream);
  });
}

}  // namespace cute_kernels::attention::sm90
