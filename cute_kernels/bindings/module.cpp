#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sstream>
#include <string>
#include <vector>

#include <cutlass/version.h>
#if CUTE_KERNELS_CUDA
#include <cuda_runtime_api.h>
#endif

#include "cute_kernels/bindings/bindings.hpp"

#ifndef CUTE_KERNELS_ARCHS
#define CUTE_KERNELS_ARCHS ""
#endif

namespace {

namespace py = pybind11;

std::string dotted(std::initializer_list<int> numbers) {
  std::string text;
  for (int n : numbers) text += (text.empty() ? "" : ".") + std::to_string(n);
  return text;
}

// What the module was built with: the CUDA architectures ("8.0", "9.0a"), none and an empty version without CUDA.
py::dict build_info() {
  py::dict info;
  std::vector<std::string> archs;
  std::string cuda_version;
#if CUTE_KERNELS_CUDA
  std::istringstream list(CUTE_KERNELS_ARCHS);
  for (std::string arch; std::getline(list, arch, ';');) archs.push_back(arch);
  cuda_version = dotted({CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10});
  info["cuda"] = true;
#else
  info["cuda"] = false;
#endif
  info["archs"] = archs;
  info["cutlass"] = dotted({CUTLASS_MAJOR, CUTLASS_MINOR, CUTLASS_PATCH});
  info["cuda_version"] = cuda_version;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Kernels over a bitmap-sparse KV cache; called by the package cute_kernels, which checks the arguments";
  m.def("build_info", &build_info);
  cute_kernels::bindings::bind_format(m);
  cute_kernels::bindings::bind_cpu(m);
#if CUTE_KERNELS_CUDA
  cute_kernels::bindings::bind_cuda(m);
#endif
  cute_kernels::bindings::bind_attention(m);
#if CUTE_KERNELS_CUDA
  cute_kernels::bindings::bind_step(m);
#endif
}
