// The parts of the extension module cute_kernels._C. Arguments are checked in Python; pointers arrive as integers.
#pragma once

#include <pybind11/pybind11.h>

namespace cute_kernels::bindings {

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
