// Launches of kernels with the attributes that they need.
#pragma once

#include "cute_kernels/common/kernel_attributes.hpp"
#include "cute_kernels/pipeline/config.hpp"

namespace cute_kernels::pipeline {

inline constexpr int kPortableCluster = 8;

inline cudaLaunchAttribute programmatic_launch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// In clusters of `cluster` CTAs (bulk-copy architectures), or of single CTAs on every device. dependent: the kernel
// begins with ptx::wait_for_primary, so that it may be set up while the one before drains.
template <class KernelParams>
void launch_clusters(void (*kernel)(KernelParams), KernelParams const& params, Config const& config, int threads,
                     int shared_bytes, bool dependent, cudaStream_t stream) {
  allow_shared_bytes(kernel, shared_bytes);
  if (config.cluster > kPortableCluster)
    raise_attribute(reinterpret_cast<void const*>(kernel), cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(config.ctas);
  launch.blockDim = dim3(threads);
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = stream;
  launch.attrs = attributes;
  if (config.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[launch.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(config.cluster), 1, 1};
  }
  if (dependent && config.programmatic_launch) attributes[launch.numAttrs++] = programmatic_launch();
  check_cuda(cudaLaunchKernelEx(&launch, kernel, params), "launch of a kernel");
}

// A kernel that waits for the one before by ptx::wait_for_primary; where `programmatic`, it is set up while that one
// drains.
template <class... Args>
void launch_dependent(void (*kernel)(Args...), dim3 grid, int threads, int shared_bytes, bool programmatic,
                      cudaStream_t stream, Args const&... args) {
  cudaLaunchAttribute attribute = programmatic_launch();
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
