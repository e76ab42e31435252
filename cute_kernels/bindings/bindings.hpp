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

// Scratch memory of a call as a tensor of 16-bit elements, of which `new_empty` makes so many: torch has no shorter
// call. Kept until the call's kernels have been queued; whatever gets the memory next is queued behind them.
class Scratch {
 public:
  explicit Scratch(pybind11::object const& new_empty) : new_empty_(new_empty) {}

  void* operator()(int64_t bytes) {
    tensor_ = new_empty_((bytes + 1) / 2);
    return to_pointer<void>(tensor_.attr("data_ptr")().cast<uintptr_t>());
  }

 private:
  pybind11::object const& new_empty_;
  pybind11::object tensor_;
};

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
