#include <cutlass/version.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>
#if CUTE_KERNELS_CUDA
#include <cuda_runtime_api.h>
#endif

#include "cute_kernels/bindings/bindings.hpp"
#include "cute_kernels/common/architectures.hpp"

namespace {

using namespace pybind11::literals;
namespace py = pybind11;
namespace ck = cute_kernels;

std::string dotted(std::initializer_list<int> numbers) {
  std::string text;
  for (int n : numbers) text += (text.empty() ? "" : ".") + std::to_string(n);
  return text;
}

#if defined(__clang__)
constexpr char kCompiler[] = "Clang " __clang_version__;
#elif defined(__GNUC__)
constexpr char kCompiler[] = "GCC " __VERSION__;
#else
constexpr char kCompiler[] = "";
#endif

// What the module was built with: the C++ compiler, the CUDA architectures ("8.0", "9.0a"); none and an empty version
// without CUDA.
py::dict build_info() {
  py::dict info;
  std::vector<std::string> archs;
  ck::any_arch(ck::kBuiltArchs, [&](ck::BuiltArch const& arch) {
    archs.push_back(std::string(arch.name) + (arch.ptx ? "+PTX" : ""));
    return false;
  });
  std::string cuda_version;
#if CUTE_KERNELS_CUDA
  cuda_version = dotted({CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10});
  info["cuda"] = true;
#else
  info["cuda"] = false;
#endif
  info["archs"] = archs;
  info["cutlass"] = dotted({CUTLASS_MAJOR, CUTLASS_MINOR, CUTLASS_PATCH});
  info["cuda_version"] = cuda_version;
  info["compiler"] = kCompiler;
  return info;
}

// Name -> the fields of its row in architectures.def.
py::dict architectures() {
  py::dict rows;
  for (ck::Architecture const& arch : ck::kArchitectures)
    rows[py::str(arch.name)] =
        py::dict("alias"_a = arch.alias, "family"_a = arch.family, "oldest_cuda"_a = arch.oldest_cuda,
                 "by_default"_a = arch.by_default, "bulk_copies"_a = arch.bulk_copies, "wgmma"_a = arch.wgmma,
                 "programmatic_launch"_a = arch.programmatic_launch);
  return rows;
}

py::dict backends() {
  py::dict rows;
  for (ck::Backend const& backend : ck::kBackends)
    rows[py::str(backend.name)] =
        py::dict("oldest"_a = backend.oldest, "newest"_a = backend.newest, "architecture"_a = backend.architecture);
  return rows;
}

// What runs where, with compute capabilities as (major, minor) and, for tests, another list of architectures.
void bind_architectures(py::module_& m) {
  m.attr("ARCHITECTURES") = architectures();
  m.attr("BACKENDS") = backends();
  m.def(
      "backend_status",
      [](std::string_view backend, int major, int minor, std::string_view archs) {
        return ck::backend_status(backend, {major, minor}, archs);
      },
      "backend"_a, "major"_a, "minor"_a, "archs"_a = ck::kBuiltArchs,
      "Why a GPU backend cannot serve a call on a device of compute capability major.minor, or empty; archs: what the "
      "extension is built for, separated by ';'");
  m.def(
      "build_status",
      [](int major, int minor, std::string_view archs) { return ck::build_status({major, minor}, archs); }, "major"_a,
      "minor"_a, "archs"_a = ck::kBuiltArchs, "Why the extension has no code for a device, or empty");
  m.def(
      "automatic_backend", [](int major, int minor) { return ck::automatic_backend({major, minor}).name; }, "major"_a,
      "minor"_a, "The GPU backend that \"auto\" takes on a device, whose status says whether it can");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Kernels over a bitmap-sparse KV cache; called by the package cute_kernels, which checks the arguments";
  m.def("build_info", &build_info);
  bind_architectures(m);
  ck::bindings::bind_format(m);
  ck::bindings::bind_cpu(m);
#if CUTE_KERNELS_CUDA
  ck::bindings::bind_cuda(m);
#endif
  ck::bindings::bind_attention(m);
}
