// The parts of the extension module cute_kernels._C. Arguments are checked in Python; pointers arrive as integers.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>

namespace cute_kernels::bindings {

using Strides = std::array<int64_t, 3>;

template <class T>
T* to_pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_format(pybind11::module_& m);  // _C.format and _C.SparseView
void bind_cpu(pybind11::module_& m);     // _C.cpu
#if CUTE_KERNELS_CUDA
void bind_cuda(pybind11::module_& m);  // _C.cuda
#endif
void bind_attention(pybind11::module_& m);  // _C.Window and sparse_attention, after the modules that it goes into
#if CUTE_KERNELS_CUDA
void bind_step(pybind11::module_& m);  // _C.cuda.Step, after all that it is made of
#endif

}  // namespace cute_kernels::bindings
