// Definitions behind launch.hpp, included by the instantiations only.
#pragma once

#include "cute_kernels/ops/attention/prefill/kernel.hpp"
#include "cute_kernels/pipeline/launch.hpp"

namespace cute_kernels::attention::prefill {

template <int kHeadDim, size_t kIndex = 0, class Stored, class F>
auto visit_variant(Stored stored, Variant variant, F&& f) {
  constexpr Variant kVariant = Launcher<kHeadDim>::kVariants[kIndex];
  if constexpr (kIndex + 1 < Launcher<kHeadDim>::kVariants.size())
    if (variant.rows() != kVariant.rows())
      return visit_variant<kHeadDim, kIndex + 1>(stored, variant, std::forward<F>(f));
  return f(Traits<Stored, kHeadDim, kVariant.consumers, kVariant.cluster_ctas>{});
}

// codec: of 16 bits, which says the dtype.
template <int kHeadDim, class F>
auto visit_traits(format::CodecId codec, Variant variant, F&& f) {
  return mma::visit_stored_operand<mma::HalfCodecs>(
      codec, [&](auto stored) { return visit_variant<kHeadDim>(stored, variant, f); });
}

template <int kHeadDim>
Limits Launcher<kHeadDim>::limits(format::CodecId codec, Variant variant) {
  return visit_traits<kHeadDim>(codec, variant, [](auto traits) {
    using T = decltype(traits);
    return Limits{T::kDecoders, kMaxBlockStages, kFixedBytes<T>};
  });
}

template <int kHeadDim>
void Launcher<kHeadDim>::launch(Params const& params, Variant variant, int ctas, int shared_bytes,
                                cudaStream_t stream) {
  visit_traits<kHeadDim>(params.keys.codec, variant, [&](auto traits) {
    using T = decltype(traits);
    pipeline::Config config{};
    config.ctas = ctas;
    config.cluster = T::kClusterCtas;
    pipeline::launch_clusters(prefill_kernel<T>, params, config, T::kThreads, shared_bytes, false, stream);
  });
}

}  // namespace cute_kernels::attention::prefill
