// Definitions behind launch.hpp for CC 9.0, included by the instantiations only.
#pragma once

#include "cute_kernels/attention/launch_impl.hpp"
#include "cute_kernels/attention/sm90/kernel.hpp"

namespace cute_kernels::attention::sm90 {

template <int kHeadDim>
KernelLimits limits(format::DType dtype, int n) {
  return visit_traits<kHeadDim>(dtype, n, [](auto traits) -> KernelLimits {
    using T = decltype(traits);
    // The stages, no fewer than workers, take their shares in the end.
    return {Storage<T>::kMaxWorkers,
            T::kWorkerWarps,
            2,
            matmul::sm90::kMaxStages,
            sizeof(Share<T>),
            kFixedBytes<T>,
            true,
            kStagesAhead,
            true};
  });
}

template <int kHeadDim>
void launch(Params const& params, Config const& config, cudaStream_t stream) {
  visit_traits<kHeadDim>(params.keys.dtype, config.n, [&](auto traits) {
    using T = decltype(traits);
    auto* kernel = params.plain        ? attention_kernel<PlainTraits<T>>
                   : params.own_orders ? attention_kernel<T>
                                       : attention_kernel<OneOrderTraits<T>>;
    RingParams ring_params{};
    static_cast<Params&>(ring_params) = params;
    ring_params.ring = matmul::sm90::ring_shape(params.stages, config);
    if (!params.ragged && !params.keys.pages.table)
      ring_params.first_tiles = matmul::sm90::first_tiles(params.keys, config);
    ring_params.cluster = matmul::sm90::cluster_shape(config, params.rows);
    int warpgroups = (config.workers * T::kWorkerWarps + kWarpgroupWarps - 1) / kWarpgroupWarps;
    launch_attention(kernel, ring_params, config, (warpgroups + 1) * kWarpgroupThreads,
                     kFixedBytes<T> + params.stages.count * params.stages.stage_bytes, stream);
    if (!params.by_segments) launch_combine<T>(params, config, stream);
  });
}

}  // namespace cute_kernels::attention::sm90
