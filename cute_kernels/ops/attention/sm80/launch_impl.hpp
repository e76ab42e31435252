// Definitions behind launch.hpp for CC 8.x, included by the instantiations only.
#pragma once

#include "cute_kernels/ops/attention/launch_impl.hpp"
#include "cute_kernels/ops/attention/sm80/kernel.hpp"

namespace cute_kernels::attention::sm80 {

// Narrow codecs have fewer kernels: more rows take more passes.
template <int kHeadDim, class Codecs>
inline constexpr int kMaxRows = mma::kHaveFewKernels<Codecs> ? 8 : max_rows(kHeadDim);

template <int kHeadDim, class Codecs>
pipeline::KernelLimits limits(format::CodecId codec, int n) {
  return visit_traits<kHeadDim, Codecs, kMaxRows<kHeadDim, Codecs>>(codec, n, [](auto traits) {
    using T = decltype(traits);
    pipeline::KernelLimits limits{};
    limits.max_workers = Storage<T>::kMaxWorkers;
    limits.worker_warps = T::kWorkerWarps;
    limits.rows_behind = T::Keys::Decoder::kRowsBehind;
    limits.min_stages = pipeline::kMinCpAsyncStages;
    limits.max_stages = pipeline::kMaxCpAsyncStages;
    limits.fixed_shared_bytes = kFixedBytes<T>;
    return limits;
  });
}

template <int kHeadDim, class Codecs>
void launch(Params const& params, pipeline::Config const& config, cudaStream_t stream) {
  visit_traits<kHeadDim, Codecs, kMaxRows<kHeadDim, Codecs>>(params.keys.codec, config.n, [&](auto traits) {
    using T = decltype(traits);
    int stage_bytes = config.workers * params.stages.count * params.stages.stage_bytes;
    pipeline::launch_clusters(attention_kernel<T>, params, config, T::kWorkerThreads * config.workers,
                              kFixedBytes<T> + params.schedule_bytes + stage_bytes, false, stream);
    launch_combine<T>(params, config, stream);
  });
}

template <int kHeadDim, class Codecs>
Launcher<Params> launcher() {
  return {kMaxRows<kHeadDim, Codecs>, limits<kHeadDim, Codecs>, launch<kHeadDim, Codecs>};
}

}  // namespace cute_kernels::attention::sm80
