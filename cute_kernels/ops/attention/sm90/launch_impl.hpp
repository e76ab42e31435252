// Definitions behind launch.hpp for CC 9.0, included by the instantiations only.
#pragma once

#include "cute_kernels/ops/attention/launch_impl.hpp"
#include "cute_kernels/ops/attention/sm90/kernel.hpp"

namespace cute_kernels::attention::sm90 {

// Warpgroups multiply bits as they are stored, whose tokens have one order.
template <int kHeadDim, class Codecs>
inline constexpr int kMaxRows =
    mma::kAreTwoOfFour<Codecs> || mma::kAreTwoOfFourBitmap<Codecs>      ? 8
    : !mma::kHaveFewKernels<Codecs> && max_warpgroup_rows(kHeadDim) > 0 ? max_warpgroup_rows(kHeadDim)
                                                                        : max_rows(kHeadDim);

template <int kHeadDim, class Codecs>
pipeline::KernelLimits limits(format::CodecId codec, int n) {
  return visit_traits<kHeadDim, Codecs, kMaxRows<kHeadDim, Codecs>>(codec, n, [](auto traits) {
    using T = decltype(traits);
    pipeline::KernelLimits limits{};
    limits.max_workers = Storage<T>::kMaxWorkers;
    limits.worker_warps = T::kWorkerWarps;
    limits.rows_behind = T::Keys::Decoder::kRowsBehind;
    limits.min_stages = 2;
    limits.max_stages = pipeline::kMaxStages;
    limits.min_block_bytes = sizeof(typename T::Partial);  // the stages, no fewer than workers, take their partials
    limits.fixed_shared_bytes = kFixedBytes<T>;
    limits.one_ring = true;
    limits.stages_ahead = kStagesAhead;
    limits.combines_in_cluster = true;
    return limits;
  });
}

template <int kHeadDim, class Codecs>
void launch(Params const& params, pipeline::Config const& config, cudaStream_t stream) {
  visit_traits<kHeadDim, Codecs, kMaxRows<kHeadDim, Codecs>>(params.keys.codec, config.n, [&](auto traits) {
    using T = decltype(traits);
    // Tiles of exactly two of four all have the order of memory.
    using Separate = std::conditional_t<mma::kAreTwoOfFour<Codecs> || T::kByWarpgroup, SharedOrderTraits<T>, T>;
    bool zeroes_masked = T::kHasNonfinite && params.zero_masked;
    auto* kernel = params.uniform                            ? attention_kernel<UniformTraits<T>>
                   : params.separate_orders || zeroes_masked ? attention_kernel<Separate>
                                                             : attention_kernel<SharedOrderTraits<T>>;
    RingParams ring_params = pipeline::ring_params(params, params.stages, config);
    if (!params.schedule.variable_length && !params.keys.pages.table)
      ring_params.prefetch_row_offsets = pipeline::row_offset_prefetch(params.keys, config);
    int warpgroups = (config.workers * T::kWorkerWarps + kWarpgroupWarps - 1) / kWarpgroupWarps;
    pipeline::launch_clusters(kernel, ring_params, config, (warpgroups + 1) * kWarpgroupThreads,
                              kFixedBytes<T> + params.schedule_bytes + params.stages.count * params.stages.stage_bytes,
                              true, stream);
    if (!params.schedule.in_cluster) launch_combine<T>(params, config, stream);
  });
}

template <int kHeadDim, class Codecs>
Launcher<Params> launcher() {
  return {kMaxRows<kHeadDim, Codecs>, limits<kHeadDim, Codecs>, launch<kHeadDim, Codecs>};
}

}  // namespace cute_kernels::attention::sm90
