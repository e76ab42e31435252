// What the launchers of all architectures share.
#pragma once

#include "cute_kernels/ops/attention/launch.hpp"
#include "cute_kernels/ops/attention/traits.hpp"
#include "cute_kernels/pipeline/launch.hpp"
#include "cute_kernels/reduce/split_combine.hpp"

namespace cute_kernels::attention {

// Calls f with the traits of a (codec, N); N is up to kMaxRows.
template <int kHeadDim, class Codecs, int kMaxRows, class F>
auto visit_traits(format::CodecId codec, int n, F&& f) {
  return mma::visit_stored_operand<Codecs>(codec, [&](auto stored) {
    using Stored = decltype(stored);
    if constexpr (kMaxRows >= 32) {
      if (n == 32) return f(Traits<Stored, kHeadDim, 32>{});
    }
    if constexpr (kMaxRows >= 16) {
      if (n == 16) return f(Traits<Stored, kHeadDim, 16>{});
    }
    return f(Traits<Stored, kHeadDim, 8>{});
  });
}

template <class Traits>
void launch_combine(Params const& params, pipeline::Config const& config, cudaStream_t stream) {
  static_assert(sizeof(typename Traits::Partial) == partial_bytes(Traits::kN, Traits::kHeadDim));
  reduce::launch_combine<reduce::LogSumExp, typename Traits::OutputShape, typename Traits::Element,
                         typename Traits::SchedulePolicy>(params.schedule, params.output, config, params.schedule_bytes,
                                                          stream);
}

}  // namespace cute_kernels::attention
