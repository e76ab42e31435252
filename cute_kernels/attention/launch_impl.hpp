// What the launchers of all architectures share.
#pragma once

#include "cute_kernels/attention/combine.hpp"
#include "cute_kernels/attention/launch.hpp"
#include "cute_kernels/common/error.hpp"
#include "cute_kernels/matmul/launch_clusters.hpp"

namespace cute_kernels::attention {

// Calls f with the traits of a (dtype, N).
template <int kHeadDim, class F>
auto visit_traits(format::DType dtype, int n, F&& f) {
  auto visit_n = [&](auto element) {
    using Element = decltype(element);
    if constexpr (max_rows(kHeadDim) == 16) {
      if (n == 16) return f(Traits<Element, kHeadDim, 16>{});
    }
    return f(Traits<Element, kHeadDim, 8>{});
  };
  return dtype == format::DType::kFloat16 ? visit_n(half_t{}) : visit_n(bfloat16_t{});
}

// Room that a stage must have at least: stages take their worker's share in the end.
template <class Traits>
constexpr int min_block_bytes(int min_stages) {
  return (static_cast<int>(sizeof(Share<Traits>)) + min_stages - 1) / min_stages;
}

// shared_bytes: all but the line's.
template <class KernelParams>
void launch_attention(void (*kernel)(KernelParams), KernelParams const& params, Config const& config, int threads,
                      int shared_bytes, cudaStream_t stream) {
  matmul::launch_clusters(kernel, params, config, threads, shared_bytes + params.line_bytes, stream);
}

template <class Traits>
void launch_combine(Params const& params, Config const& config, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(params.batch * params.row_segments.divisor, kAtoms<Traits>);
  int warps = 2, segments = static_cast<int>(launch.gridDim.x);
  while (warps < kMaxCombineWarps && warps * segments < config.ctas + segments) warps *= 2;  // partials of a segment
  launch.blockDim = dim3(32 * warps);
  launch.dynamicSmemBytes = combine_shared_bytes<Traits>(params, warps);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = config.programmatic_launch ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&launch, combine_partials<Traits>, params), "launch of combine_partials");
}

}  // namespace cute_kernels::attention
