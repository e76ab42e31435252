#include <array>
#include <mutex>

#include "cute_kernels/common/error.hpp"
#include "cute_kernels/dispatch/device.hpp"

namespace cute_kernels::dispatch {
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

bool has_backend(std::string const& backend) {
  return (backend == "sm80" && CUTE_KERNELS_HAVE_SM80) || (backend == "sm90" && CUTE_KERNELS_HAVE_SM90A);
}

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
    // The combine waits for the product kernel only in code for 9.0: PTX for 8.0 that a driver compiles must not
    // overlap it.
    limits.programmatic_launch = CUTE_KERNELS_HAVE_SM90A && limits.major == 9 && limits.minor == 0;
    if (!limits.programmatic_launch) return;
    for (int i = 1; i <= kMaxClusterLog2; ++i) limits.max_clusters[i] = max_clusters(limits, 1u << i);
  });
  return known[device];
}

void require_backend(std::string const& backend, DeviceLimits const& device) {
  std::string capability = std::to_string(device.major) + "." + std::to_string(device.minor);
  if (!has_backend(backend)) throw std::runtime_error("backend '" + backend + "' is not built into this extension");
  if (backend == "sm80" && device.major < 8)
    throw std::runtime_error("backend 'sm80' needs compute capability 8.0 or higher, this device has " + capability);
  if (backend == "sm90" && (device.major != 9 || device.minor != 0))
    throw std::runtime_error("backend 'sm90' needs compute capability 9.0, this device has " + capability);
}

}  // namespace cute_kernels::dispatch
