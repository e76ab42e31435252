// _C.Window, and sparse_attention of every backend. Arguments were checked in Python; pointers arrive as integers, 0 is
// null.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <optional>
#include <string>

#include "cute_kernels/attention/problem.hpp"
#include "cute_kernels/bindings/bindings.hpp"
#include "cute_kernels/cpu/sparse_attention.hpp"
#if CUTE_KERNELS_CUDA
#include "cute_kernels/dispatch/attention.hpp"
#endif

namespace cute_kernels::bindings {
namespace {

namespace py = pybind11;
using attention::Problem;
using attention::Window;
using format::SparseView;

Window make_window(uintptr_t keys, uintptr_t values, const Strides& key_strides, const Strides& value_strides,
                   int tokens, uintptr_t lengths) {
  return {to_pointer<void>(keys),
          to_pointer<void>(values),
          {key_strides[0], key_strides[1], key_strides[2]},
          {value_strides[0], value_strides[1], value_strides[2]},
          tokens,
          to_pointer<int32_t>(lengths)};
}

Problem make_problem(const SparseView& keys, const SparseView& values, const std::optional<Window>& window, uintptr_t q,
                     const Strides& q_strides, int batch, int q_heads, int q_tokens, uintptr_t sequences,
                     uintptr_t lengths, float scale, bool causal, uintptr_t out, uintptr_t lse, int num_splits) {
  return {keys,
          values,
          to_pointer<void>(q),
          {q_strides[0], q_strides[1], q_strides[2]},
          batch,
          q_heads,
          q_tokens,
          to_pointer<int32_t>(sequences),
          to_pointer<int32_t>(lengths),
          window.value_or(Window{}),
          scale,
          causal,
          to_pointer<void>(out),
          to_pointer<float>(lse),
          num_splits};
}

void cpu_sparse_attention(const SparseView& keys, const SparseView& values, const std::optional<Window>& window,
                          uintptr_t q, const Strides& q_strides, int batch, int q_heads, int q_tokens,
                          uintptr_t sequences, uintptr_t lengths, float scale, bool causal, uintptr_t out,
                          uintptr_t lse, int num_splits, int threads) {
  const Problem problem = make_problem(keys, values, window, q, q_strides, batch, q_heads, q_tokens, sequences, lengths,
                                       scale, causal, out, lse, num_splits);
  py::gil_scoped_release unlocked;
  cpu::sparse_attention(problem, threads);
}

#if CUTE_KERNELS_CUDA
void cuda_sparse_attention(const SparseView& keys, const SparseView& values, const std::optional<Window>& window,
                           uintptr_t q, const Strides& q_strides, int batch, int q_heads, int q_tokens,
                           uintptr_t sequences, uintptr_t lengths, float scale, bool causal, uintptr_t out,
                           uintptr_t lse, int num_splits, const py::object& new_empty, const std::string& backend,
                           uintptr_t stream) {
  Scratch scratch(new_empty);
  dispatch::run(make_problem(keys, values, window, q, q_strides, batch, q_heads, q_tokens, sequences, lengths, scale,
                             causal, out, lse, num_splits),
                std::ref(scratch), backend, to_pointer<CUstream_st>(stream));
}
#endif

}  // namespace

void bind_attention(py::module_& m) {
  using namespace py::literals;
  py::class_<Window>(m, "Window", "Dense newest tokens as pointers and sizes; owns nothing")
      .def(py::init(&make_window), "keys"_a, "values"_a, "key_strides"_a, "value_strides"_a, "tokens"_a, "lengths"_a);

  m.attr("cpu").cast<py::module_>().def("sparse_attention", &cpu_sparse_attention, "keys"_a, "values"_a, "window"_a,
                                        "q"_a, "q_strides"_a, "batch"_a, "q_heads"_a, "q_tokens"_a, "sequences"_a,
                                        "lengths"_a, "scale"_a, "causal"_a, "out"_a, "lse"_a, "num_splits"_a,
                                        "threads"_a);

#if CUTE_KERNELS_CUDA
  auto cuda = m.attr("cuda").cast<py::module_>();
  cuda.def("sparse_attention", &cuda_sparse_attention, "keys"_a, "values"_a, "window"_a, "q"_a, "q_strides"_a,
           "batch"_a, "q_heads"_a, "q_tokens"_a, "sequences"_a, "lengths"_a, "scale"_a, "causal"_a, "out"_a, "lse"_a,
           "num_splits"_a, "new_empty"_a, "backend"_a, "stream"_a);
#endif
}

}  // namespace cute_kernels::bindings
