// _C.cuda.Step: a decoding step of one cache, append and then attention, in one call. Arguments were checked in Python;
// pointers arrive as integers.
#if CUTE_KERNELS_CUDA

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <string>
#include <utility>

#include "cute_kernels/bindings/bindings.hpp"
#include "cute_kernels/compress/pages.hpp"
#include "cute_kernels/dispatch/attention.hpp"

namespace cute_kernels::bindings {
namespace {

namespace py = pybind11;

// What stays as it is from step to step: the cache, and how its new tokens and queries lie.
class Step {
 public:
  Step(compress::Pool const& pool, compress::Windows const& windows, attention::Window const& window, uintptr_t lengths,
       int batch, int64_t tokens, Strides const& k_strides, Strides const& v_strides, Strides const& q_strides,
       int q_heads, int q_tokens, float scale, std::string backend)
      : pool_(pool), windows_(windows), lengths_(to_pointer<int32_t>(lengths)), backend_(std::move(backend)) {
    auto rows = [&](Strides const& strides) {
      return compress::DenseView{nullptr, strides[0],         strides[1],     strides[2], batch, pool.keys.kv_heads,
                                 tokens,  pool.keys.head_dim, pool.keys.dtype};
    };
    k_ = rows(k_strides);
    v_ = rows(v_strides);
    problem_.keys = pool.keys;
    problem_.values = pool.values;
    for (int i = 0; i < 3; ++i) problem_.q_strides[i] = q_strides[i];
    problem_.batch = batch;
    problem_.q_heads = q_heads;
    problem_.q_tokens = q_tokens;
    problem_.lengths = lengths_;
    problem_.window = window;
    problem_.scale = scale;
    problem_.causal = true;
  }

  void run(uintptr_t k, uintptr_t v, uintptr_t q, uintptr_t out, py::object const& new_empty,
           uintptr_t stream) const {
    compress::DenseView keys = k_, values = v_;
    keys.data = to_pointer<void>(k);
    values.data = to_pointer<void>(v);
    attention::Problem problem = problem_;
    problem.q = to_pointer<void>(q);
    problem.out = to_pointer<void>(out);
    compress::append(pool_, windows_, lengths_, keys, values, nullptr, to_pointer<CUstream_st>(stream));
    Scratch scratch(new_empty);
    dispatch::run(problem, std::ref(scratch), backend_, to_pointer<CUstream_st>(stream));
  }

 private:
  compress::Pool pool_;
  compress::Windows windows_;
  int32_t* lengths_;
  std::string backend_;
  compress::DenseView k_{}, v_{};  // without their data
  attention::Problem problem_{};   // without q and out
};

}  // namespace

void bind_step(py::module_& m) {
  using namespace py::literals;
  auto cuda = m.attr("cuda").cast<py::module_>();
  py::class_<Step>(cuda, "Step", "append and sparse_attention of a decoding step; row i is sequence i. Owns nothing")
      .def(py::init<compress::Pool const&, compress::Windows const&, attention::Window const&, uintptr_t, int, int64_t,
                    Strides const&, Strides const&, Strides const&, int, int, float, std::string>(),
           "pool"_a, "windows"_a, "window"_a, "lengths"_a, "batch"_a, "tokens"_a, "k_strides"_a, "v_strides"_a,
           "q_strides"_a, "q_heads"_a, "q_tokens"_a, "scale"_a, "backend"_a)
      .def("run", &Step::run, "k"_a, "v"_a, "q"_a, "out"_a, "new_empty"_a, "stream"_a);
}

}  // namespace cute_kernels::bindings

#endif  // CUTE_KERNELS_CUDA
