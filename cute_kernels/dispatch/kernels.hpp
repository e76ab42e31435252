// The table of kernels: backend x operation x head_dim x codecs that share a launcher (mma/stored_operand.hpp).
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "cute_kernels/dispatch/backend.hpp"
#include "cute_kernels/format/head_dim.hpp"
#include "cute_kernels/mma/stored_operand.hpp"
#include "cute_kernels/ops/attention/launch.hpp"
#include "cute_kernels/ops/attention/prefill/launch.hpp"
#include "cute_kernels/ops/av/launch.hpp"
#include "cute_kernels/ops/qk/launch.hpp"

namespace cute_kernels::dispatch {

template <class Params>
struct Kernels {
  Launcher<Params> launcher;

  // The smallest instantiated N that holds all rows, or the largest.
  int rows_per_pass(int rows) const {
    int n = 8;
    while (n < rows && n < launcher.max_rows) n *= 2;
    return n;
  }
};

// Of the codecs that a storage's is of. std::runtime_error where these have no products.
template <class Params, class F>
Kernels<Params> kernels_of(format::SparseView const& view, F&& launcher) {
  return mma::visit_codecs(view, [&](auto codecs) -> Kernels<Params> {
    if constexpr (mma::kHaveProducts<decltype(codecs)> || std::is_same_v<Params, attention::Params>)
      return {launcher(codecs)};
    else
      throw std::runtime_error(std::string("there are no CUDA kernels of products for the tile format ") +
                               format::tile_format_name(view.tile_format));
  });
}

template <int kHeadDim>
struct Sm80 {
  static constexpr bool kHasPrefill = false;
  static Kernels<qk::Params> qk_kernels(format::SparseView const& view) {
    return kernels_of<qk::Params>(view, [](auto codecs) { return qk::sm80::launcher<kHeadDim, decltype(codecs)>(); });
  }
  static Kernels<av::Params> av_kernels(format::SparseView const& view) {
    return kernels_of<av::Params>(view, [](auto codecs) { return av::sm80::launcher<kHeadDim, decltype(codecs)>(); });
  }
  static Kernels<attention::Params> attention_kernels(format::SparseView const& view) {
    return kernels_of<attention::Params>(
        view, [](auto codecs) { return attention::sm80::launcher<kHeadDim, decltype(codecs)>(); });
  }
};

template <int kHeadDim>
struct Sm90 {
  static constexpr bool kHasPrefill = true;
  static Kernels<qk::Params> qk_kernels(format::SparseView const& view) {
    return kernels_of<qk::Params>(view, [](auto codecs) { return qk::sm90::launcher<kHeadDim, decltype(codecs)>(); });
  }
  static Kernels<av::Params> av_kernels(format::SparseView const& view) {
    return kernels_of<av::Params>(view, [](auto codecs) { return av::sm90::launcher<kHeadDim, decltype(codecs)>(); });
  }
  static Kernels<attention::Params> attention_kernels(format::SparseView const& view) {
    return kernels_of<attention::Params>(
        view, [](auto codecs) { return attention::sm90::launcher<kHeadDim, decltype(codecs)>(); });
  }
  template <class Codecs>
  using Prefill = attention::prefill::Launcher<kHeadDim, Codecs>;  // takes any number of query rows
};

// f(Backend<head_dim>{}). std::runtime_error if the library or the device lacks the backend, std::invalid_argument for
// a head_dim that is not instantiated.
template <class F>
auto visit_backend(std::string const& backend, int padded_head_dim, DeviceLimits const& device, F&& f) {
  require_backend(backend, device);
  return format::visit_head_dim(padded_head_dim, [&](auto head_dim) {
    constexpr int kHeadDim = decltype(head_dim)::value;
    if constexpr (has_backend("sm90")) {  // what is not built must not be named, or it would have to be linked
      if (backend == "sm90") return f(Sm90<kHeadDim>{});
    }
    if constexpr (has_backend("sm80")) {
      if (backend == "sm80") return f(Sm80<kHeadDim>{});
    }
    throw std::runtime_error("backend '" + backend + "' has no CUDA kernels");
  });
}

}  // namespace cute_kernels::dispatch
