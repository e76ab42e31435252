// Definitions behind launch.hpp for CC 8.x, included by the instantiations only.
#pragma once

#include "cute_kernels/ops/attention/launch_impl.hpp"
#include "cute_kernels/ops/attention/sm80/kernel.hpp"

namespace cute_kernels::attention::sm80 {

template <int kHeadDim, class Codecs>
pipeline::KernelLimits limits(format::CodecId codec, int n) {
  return visit_traits<kHeadDim, Codecs>(codec, DType::kFloat16, n, [](auto traits) {
    using T = decltype(traits);
    pipeline::KernelLimits limits{};
    limits.max_workers = Storage<T>::kMaxWorkers;
    limits.worker_warps = T::kWorkerWarps;
    limits.rows_behind = T::Codec::kRowsBehind;
    limits.min_stages = pipeline::kMinCpAsyncStages;
    limits.max_stages = pipeline::kMaxCpAsyncStages;
    limits.fixed_shared_bytes = kFixedBytes<T>;
    return limits;
  });
}

template <int kHeadDim, class Codecs>
void launch(Params const& params, pipeline::Config const& config, cudaStream_t stream) {
  visit_traits<kHeadDim, Codecs>(params.keys.codec, params.keys.dtype, config.n, [&](auto traits) {
    using T = decltype(traits);
    int stage_bytes = config.workers * params.stages.count * params.stages.stage_bytes;
    pipeline::launch_clusters(attention_kernel<T>, params, config, T::kWorkerThreads * config.workers,
                              kFixedBytes<T> + params.schedule_bytes + stage_bytes, false, stream);
    launch_combine<T>(params, config, stream);
  });
}

template <int kHeadDim, class Codecs>
Launcher<Params> launcher() {
  return {limits<kHeadDim, Codecs>, launch<kHeadDim, Codecs>};
}

}  // namespace cute_kernels::attention::sm80
