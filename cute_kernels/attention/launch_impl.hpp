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
  int segments = params.batch * params.row_segments.divisor, partials = config.ctas * config.workers + segments;
  int summands_log2 = kMinSummandsLog2;
  while (summands_log2 < kMaxSummandsLog2 && int64_t{2 * segments} << summands_log2 < partials) ++summands_log2;
  int threads = 1 << (matmul::items_of(params.rows).count_log2(kAtomsLog2<Traits>) + summands_log2);
  launch.gridDim = dim3(segments, (threads + kCombineThreads - 1) / kCombineThreads);
  launch.blockDim = dim3(kCombineThreads);
  launch.dynamicSmemBytes = params.line_bytes;
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = config.programmatic_launch ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&launch, combine_partials<Traits>, params, summands_log2),
             "launch of combine_partials");
}

}  // namespace cute_kernels::attention
