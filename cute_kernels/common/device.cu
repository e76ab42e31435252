#include <array>
#include <mutex>

#include "cute_kernels/common/architectures.hpp"
#include "cute_kernels/common/device.hpp"
#include "cute_kernels/common/error.hpp"

namespace cute_kernels {
namespace {

__global__ void fill_multiprocessor() {}

// Clusters of CTAs that take an SM each: how many run at a time. More than 8 CTAs a cluster need not be possible.
int max_clusters(DeviceLimits const& device, unsigned ctas) {
  check_cuda(cudaFuncSetAttribute(fill_multiprocessor, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
             "cudaFuncSetAttribute");
  check_cuda(
      cudaFuncSetAttribute(fill_multiprocessor, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes),
      "cudaFuncSetAttribute");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {ctas, 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(ctas);
  launch.blockDim = dim3(32);
  launch.dynamicSmemBytes = device.shared_bytes;
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  int clusters = 0;
  cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, fill_multiprocessor, &launch);
  if (error == cudaErrorInvalidClusterSize) return cudaGetLastError(), 0;
  check_cuda(error, "cudaOccupancyMaxActiveClusters");
  return clusters;
}

}  // namespace

DeviceLimits current_device() {
  constexpr int kMaxDevices = 64;
  static std::array<DeviceLimits, kMaxDevices> known;
  static std::array<std::once_flag, kMaxDevices> once;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMaxDevices) throw std::runtime_error("device index " + std::to_string(device) + " is not below 64");
  std::call_once(once[device], [&] {
    auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
      return value;
    };
    DeviceLimits& limits = known[device];
    limits.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
    limits.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    limits.major = attribute(cudaDevAttrComputeCapabilityMajor);
    limits.minor = attribute(cudaDevAttrComputeCapabilityMinor);
    limits.programmatic_launch = has_programmatic_launch({limits.major, limits.minor});
    if (!limits.programmatic_launch) return;
    for (int ctas = 2; ctas <= kMaxCluster; ++ctas) limits.max_clusters[ctas] = max_clusters(limits, ctas);
  });
  return known[device];
}

}  // namespace cute_kernels
