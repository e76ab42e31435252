// Attributes of kernels that their launches need, set once rather than at every launch.
#pragma once

#include <map>
#include <mutex>
#include <tuple>

#include "cute_kernels/common/error.hpp"

namespace cute_kernels {

// Gives a kernel at least this value of an attribute on the current device. Never lowers one: what needs less does with
// more. Of attributes that nothing else sets.
inline void raise_attribute(void const* kernel, cudaFuncAttribute attribute, int value) {
  static std::mutex mutex;
  static std::map<std::tuple<void const*, int, int>, int> largest;  // that was set, by kernel, attribute and device
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  std::lock_guard<std::mutex> lock(mutex);
  int& set = largest[{kernel, static_cast<int>(attribute), device}];
  if (value <= set) return;
  check_cuda(cudaFuncSetAttribute(kernel, attribute, value), "cudaFuncSetAttribute");
  set = value;
}

// Lets a kernel be launched on the current device with so much dynamic shared memory.
template <class... Args>
void allow_shared_bytes(void (*kernel)(Args...), int bytes) {
  raise_attribute(reinterpret_cast<void const*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace cute_kernels
