// The parts of the extension module cute_kernels._C. Arguments are checked in Python; pointers arrive as integers.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <stdexcept>

#if CUTE_KERNELS_CUDA
#include "cute_kernels/dispatch/tuning.hpp"
#endif

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

#if CUTE_KERNELS_CUDA
inline dispatch::Tuning make_tuning(int stages_ahead) {
  if (stages_ahead < 0) throw std::invalid_argument("stages_ahead must be at least 0");
  dispatch::Tuning tuning;
  tuning.stages_ahead = stages_ahead;
  return tuning;
}
#endif

void bind_format(pybind11::module_& m);  // _C.format and _C.SparseView
void bind_cpu(pybind11::module_& m);     // _C.cpu
#if CUTE_KERNELS_CUDA
void bind_cuda(pybind11::module_& m);  // _C.cuda
#endif
void bind_attention(pybind11::module_& m);  // _C.Window and attention, into the modules made before

}  // namespace cute_kernels::bindings
