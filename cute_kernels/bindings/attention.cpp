// _C.Window, _C.AttentionProblem, attention of every backend, and _C.cuda.DecodingStep. Arguments were checked in
// Python; pointers arrive as integers, 0 is null.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "cute_kernels/bindings/bindings.hpp"
#include "cute_kernels/cpu/sparse_attention.hpp"
#include "cute_kernels/ops/attention/problem.hpp"
#if CUTE_KERNELS_CUDA
#include "cute_kernels/compress/pages.hpp"
#include "cute_kernels/dispatch/attention.hpp"
#endif

namespace cute_kernels::bindings {
namespace {

namespace py = pybind11;
using attention::Problem;
using attention::Window;
using format::SparseView;
using QueryShape = std::array<int, 3>;  // batch, heads, tokens

void copy_strides(Strides const& from, int64_t* to) { std::copy(from.begin(), from.end(), to); }

Window make_window(uintptr_t keys, uintptr_t values, Strides const& key_strides, Strides const& value_strides,
                   int tokens, uintptr_t lengths) {
  Window window{};
  window.keys = to_pointer<void>(keys);
  window.values = to_pointer<void>(values);
  copy_strides(key_strides, window.key_strides);
  copy_strides(value_strides, window.value_strides);
  window.tokens = tokens;
  window.lengths = to_pointer<int32_t>(lengths);
  return window;
}

// Everything but the pointers that change from call to call: q, sequences, lengths, query_starts, out and lse.
Problem make_problem(SparseView const& keys, SparseView const& values, std::optional<Window> const& window,
                     QueryShape const& q_shape, Strides const& q_strides, float scale, bool causal, int num_splits,
                     std::pair<int, int64_t> expected, int packed_tokens) {
  Problem problem{};
  problem.keys = keys;
  problem.values = values;
  problem.window = window.value_or(Window{});
  problem.batch = q_shape[0];
  problem.q_heads = q_shape[1];
  problem.q_tokens = q_shape[2];
  problem.packed.tokens = packed_tokens;
  copy_strides(q_strides, problem.q_strides);
  problem.scale = scale;
  problem.causal = causal;
  problem.num_splits = num_splits;
  problem.expected = {expected.first, expected.second};
  return problem;
}

Problem with_pointers(Problem problem, uintptr_t q, uintptr_t sequences, uintptr_t lengths, uintptr_t query_starts,
                      uintptr_t out, uintptr_t lse) {
  problem.q = to_pointer<void>(q);
  problem.sequences = to_pointer<int32_t>(sequences);
  problem.lengths = to_pointer<int32_t>(lengths);
  problem.packed.starts = to_pointer<int32_t>(query_starts);
  problem.out = to_pointer<void>(out);
  problem.lse = to_pointer<float>(lse);
  return problem;
}

void cpu_attention(Problem const& problem, uintptr_t q, uintptr_t sequences, uintptr_t lengths, uintptr_t query_starts,
                   uintptr_t out, uintptr_t lse, int threads) {
  Problem const call = with_pointers(problem, q, sequences, lengths, query_starts, out, lse);
  py::gil_scoped_release unlocked;
  cpu::sparse_attention(call, threads);
}

#if CUTE_KERNELS_CUDA
void cuda_attention(Problem const& problem, uintptr_t q, uintptr_t sequences, uintptr_t lengths, uintptr_t query_starts,
                    uintptr_t out, uintptr_t lse, py::object const& new_empty, std::string const& backend,
                    int stages_ahead, uintptr_t stream) {
  Scratch scratch(new_empty);
  dispatch::run(with_pointers(problem, q, sequences, lengths, query_starts, out, lse), std::ref(scratch), backend,
                make_tuning(stages_ahead), to_pointer<CUstream_st>(stream));
}

// A decoding step of one cache: append, then attention. Holds what stays as it is from step to step: the cache, and how
// new tokens and queries lie.
class DecodingStep {
 public:
  DecodingStep(compress::Pool const& pool, compress::Windows const& windows, Problem const& problem, uintptr_t lengths,
               Strides const& k_strides, Strides const& v_strides, int batch, int64_t tokens, std::string backend)
      : pool_(pool),
        windows_(windows),
        problem_(problem),
        lengths_(to_pointer<int32_t>(lengths)),
        k_(new_tokens(k_strides, batch, tokens)),
        v_(new_tokens(v_strides, batch, tokens)),
        backend_(std::move(backend)) {
    problem_.lengths = lengths_;
  }

  // Of a step like one that has run: attention refuses nothing that it did not refuse then.
  void run(uintptr_t k, uintptr_t v, uintptr_t q, uintptr_t out, py::object const& new_empty, uintptr_t stream) const {
    compress::DenseView keys = k_, values = v_;
    keys.data = to_pointer<void>(k);
    values.data = to_pointer<void>(v);
    Problem problem = problem_;
    problem.q = to_pointer<void>(q);
    problem.out = to_pointer<void>(out);
    compress::append(pool_, windows_, lengths_, keys, values, nullptr, {}, to_pointer<CUstream_st>(stream));
    Scratch scratch(new_empty);
    dispatch::run(problem, std::ref(scratch), backend_, {}, to_pointer<CUstream_st>(stream));
  }

 private:
  compress::DenseView new_tokens(Strides const& strides, int batch, int64_t tokens) const {
    compress::DenseView view{};
    view.stride_batch = strides[0];
    view.stride_head = strides[1];
    view.stride_token = strides[2];
    view.batch = batch;
    view.kv_heads = pool_.keys.kv_heads;
    view.tokens = tokens;
    view.head_dim = pool_.keys.head_dim;
    view.dtype = pool_.keys.dtype;
    return view;
  }

  compress::Pool pool_;
  compress::Windows windows_;
  Problem problem_;  // without q and out
  int32_t* lengths_;
  compress::DenseView k_, v_;  // without their data
  std::string backend_;
};
#endif

}  // namespace

void bind_attention(py::module_& m) {
  using namespace py::literals;
  py::class_<Window>(m, "Window", "Dense newest tokens as pointers and sizes; owns nothing")
      .def(py::init(&make_window), "keys"_a, "values"_a, "key_strides"_a, "value_strides"_a, "tokens"_a, "lengths"_a);

  py::class_<Problem>(m, "AttentionProblem",
                      "What calls of attention have in common: caches, window, how queries lie, options; owns nothing")
      .def(py::init(&make_problem), "keys"_a, "values"_a, "window"_a.none(true), "q_shape"_a, "q_strides"_a, "scale"_a,
           "causal"_a, "num_splits"_a, "expected"_a, "packed_tokens"_a);

  m.attr("cpu").cast<py::module_>().def("attention", &cpu_attention, "problem"_a, "q"_a, "sequences"_a, "lengths"_a,
                                        "query_starts"_a, "out"_a, "lse"_a, "threads"_a);

#if CUTE_KERNELS_CUDA
  auto cuda = m.attr("cuda").cast<py::module_>();
  cuda.def("attention", &cuda_attention, "problem"_a, "q"_a, "sequences"_a, "lengths"_a, "query_starts"_a, "out"_a,
           "lse"_a, "new_empty"_a, "backend"_a, "stages_ahead"_a, "stream"_a);
  cuda.def(
      "has_prefill_kernel",
      [](int codec, int tile_format) {
        return dispatch::has_prefill_kernel(static_cast<format::CodecId>(codec),
                                            static_cast<format::TileFormatId>(tile_format));
      },
      "codec"_a, "tile_format"_a, "Whether sm90 has a kernel for many query rows over such caches");
  py::class_<DecodingStep>(cuda, "DecodingStep", "append and attention in one call; row i is sequence i. Owns nothing")
      .def(py::init<compress::Pool const&, compress::Windows const&, Problem const&, uintptr_t, Strides const&,
                    Strides const&, int, int64_t, std::string>(),
           "pool"_a, "windows"_a, "problem"_a, "lengths"_a, "k_strides"_a, "v_strides"_a, "batch"_a, "tokens"_a,
           "backend"_a)
      .def("run", &DecodingStep::run, "k"_a, "v"_a, "q"_a, "out"_a, "new_empty"_a, "stream"_a);
#endif
}

}  // namespace cute_kernels::bindings
