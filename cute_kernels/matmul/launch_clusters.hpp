// A launch in clusters of CTAs, CC 9.0. Of single CTAs on every device.
#pragma once

#include "cute_kernels/common/kernel_attributes.hpp"
#include "cute_kernels/matmul/launch.hpp"

namespace cute_kernels::matmul {

inline constexpr int kPortableCluster = 8;

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

}  // namespace cute_kernels::matmul
