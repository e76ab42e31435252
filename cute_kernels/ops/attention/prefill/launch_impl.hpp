// Definitions behind launch.hpp, included by the instantiations only.
#pragma once

#include "cute_kernels/common/device.hpp"
#include "cute_kernels/ops/attention/prefill/kernel.hpp"
#include "cute_kernels/pipeline/launch.hpp"

namespace cute_kernels::attention::prefill {

// f(traits) with the variant's.
template <int kHeadDim, class Codecs, class Element, size_t kIndex = 0, class F>
auto visit_variant(Variant variant, F&& f) {
  constexpr auto kVariants = Launcher<kHeadDim, Codecs>::kVariants;
  constexpr Variant kVariant = kVariants[kIndex];
  if constexpr (kIndex + 1 < kVariants.size())
    if (variant.rows() != kVariant.rows())
      return visit_variant<kHeadDim, Codecs, Element, kIndex + 1>(variant, std::forward<F>(f));
  return f(Traits<Codecs, Element, kHeadDim, kVariant.consumers, kVariant.cluster_ctas>{});
}

template <int kHeadDim, class Codecs, class F>
auto visit_traits(format::SparseView const& keys, Variant variant, F&& f) {
  if constexpr (mma::kHavePrefillOfHalf<Codecs>)
    if (keys.codec == format::CodecId::kBf16)
      return visit_variant<kHeadDim, Codecs, bfloat16_t>(variant, std::forward<F>(f));
  return visit_variant<kHeadDim, Codecs, half_t>(variant, std::forward<F>(f));
}

template <int kHeadDim, class Codecs>
Limits Launcher<kHeadDim, Codecs>::limits(format::SparseView const& keys, Variant variant) {
  return visit_traits<kHeadDim, Codecs>(keys, variant, [](auto traits) {
    using T = decltype(traits);
    return Limits{T::kDecoders, kMaxBlockStages, kFixedBytes<T>};
  });
}

template <int kHeadDim, class Codecs>
void Launcher<kHeadDim, Codecs>::launch(Params const& params, Variant variant, int ctas, int shared_bytes,
                                        cudaStream_t stream) {
  visit_traits<kHeadDim, Codecs>(params.keys, variant, [&](auto traits) {
    using T = decltype(traits);
    pipeline::Config config{};
    config.ctas = ctas;
    config.cluster = params.merges ? params.splits.divisor : T::kClusterCtas;
    config.programmatic_launch = current_device().programmatic_launch;
    pipeline::launch_clusters(prefill_kernel<T>, params, config, T::kThreads, shared_bytes, true, stream);
  });
}

}  // namespace cute_kernels::attention::prefill
