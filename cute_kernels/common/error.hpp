// CUDA errors as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace cute_kernels {

inline void check_cuda(cudaError_t error, char const* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clear it: the next call must not report this one
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace cute_kernels
