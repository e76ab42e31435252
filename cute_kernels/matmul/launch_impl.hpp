// Definitions behind launch.hpp, included by the instantiations only, after the pipeline of their architecture.
#pragma once

#include "cute_kernels/common/error.hpp"
#include "cute_kernels/matmul/kernel_av.hpp"
#include "cute_kernels/matmul/kernel_qk.hpp"
#include "cute_kernels/matmul/launch.hpp"

namespace cute_kernels::matmul {

// Calls f with the traits of a (dtype, N).
template <Role kRole, int kHeadDim, class F>
auto visit_traits(format::DType dtype, int n, F&& f) {
  auto visit_n = [&](auto element) {
    using Element = decltype(element);
    return n == 8 ? f(Traits<kRole, Element, kHeadDim, 8>{}) : f(Traits<kRole, Element, kHeadDim, 16>{});
  };
  return dtype == format::DType::kFloat16 ? visit_n(half_t{}) : visit_n(bfloat16_t{});
}

template <class Arch, Role kRole, int kHeadDim>
KernelLimits limits(format::DType dtype, int n) {
  return visit_traits<kRole, kHeadDim>(dtype, n, [](auto traits) -> KernelLimits {
    using T = decltype(traits);
    if constexpr (T::kIsKey) return {T::kMaxWarps, kMinStages, kMaxStages, min_block_bytes_qk<T>(), 0};
    constexpr int kLastSegmentBytes = T::kMaxWarps * sizeof(int);
    return {T::kMaxWarps, kMinStages, kMaxStages, share_bytes<T>() / kMinStages, kLastSegmentBytes};
  });
}

template <class Kernel>
void launch_product(Kernel kernel, Params const& params, Config const& config, cudaStream_t stream) {
  int shared_bytes = config.warps * params.stages.count * params.stages.stage_bytes;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             "cudaFuncSetAttribute");
  kernel<<<config.ctas, 32 * config.warps, shared_bytes, stream>>>(params);
  check_cuda(cudaGetLastError(), "launch of a product kernel");
}

template <class Traits>
void launch_combine(Params const& params, Config const& config, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(params.work.tiles / params.work.tiles_per_segment.divisor, kAtoms<Traits>);
  launch.blockDim = dim3(32 * kCombineWarps);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = config.programmatic_launch ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&launch, combine_partials<Traits>, params, config.warps), "launch of combine_partials");
}

template <class Arch, Role kRole, int kHeadDim>
void launch(Params const& params, Config const& config, cudaStream_t stream) {
  visit_traits<kRole, kHeadDim>(params.sparse.dtype, config.n, [&](auto traits) {
    using T = decltype(traits);
    using Pipeline = typename PipelineOf<Arch, T>::Type;
    if constexpr (T::kIsKey) {
      launch_product(sparse_qk_kernel<T, Pipeline>, params, config, stream);
    } else {
      if (params.dense.dtype == params.sparse.dtype)
        launch_product(sparse_av_kernel<T, Pipeline, false>, params, config, stream);
      else launch_product(sparse_av_kernel<T, Pipeline, true>, params, config, stream);
      launch_combine<T>(params, config, stream);
    }
  });
}

}  // namespace cute_kernels::matmul
