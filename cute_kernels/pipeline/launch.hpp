// Launches of kernels with the attributes that they need.
#pragma once

#include "cute_kernels/common/kernel_attributes.hpp"
#include "cute_kernels/pipeline/config.hpp"

namespace cute_kernels::pipeline {

inline constexpr int kPortableCluster = 8;

// In clusters of `cluster` CTAs (bulk-copy architectures), or of single CTAs on every device.
template <class KernelParams>
void launch_clusters(void (*kernel)(KernelParams), KernelParams const& params, Config const& config, int threads,
                     int shared_bytes, cudaStream_t stream) {
  allow_shared_bytes(kernel, shared_bytes);
  if (config.cluster > kPortableCluster)
    raise_attribute(reinterpret_cast<void const*>(kernel), cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(config.cluster), 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(config.ctas);
  launch.blockDim = dim3(threads);
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = config.cluster > 1 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&launch, kernel, params), "launch of a kernel");
}

// A kernel that waits for the one before by ptx::wait_for_primary; where `programmatic`, it is set up while that one
// drains.
template <class... Args>
void launch_dependent(void (*kernel)(Args...), dim3 grid, int threads, int shared_bytes, bool programmatic,
                      cudaStream_t stream, Args const&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = grid;
  launch.blockDim = dim3(threads);
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = programmatic ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&launch, kernel, args...), "launch of a dependent kernel");
}

}  // namespace cute_kernels::pipeline
