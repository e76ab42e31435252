// From a padded head_dim to the kernels that are instantiated for it.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace cute_kernels::format {

// f(std::integral_constant<int, padded>). std::invalid_argument for a number of channels that no tile holds.
template <class F>
decltype(auto) visit_head_dim(int padded, F&& f) {
#define CUTE_KERNELS_FOR_HEAD_DIM(head_dim) \
  case head_dim:                            \
    return f(std::integral_constant<int, head_dim>{});
  switch (padded) {
#include "cute_kernels/format/head_dims.def"
  }
#undef CUTE_KERNELS_FOR_HEAD_DIM
  throw std::invalid_argument("head_dim " + std::to_string(padded) +
                              " is not instantiated; head_dims.def lists what is");
}

}  // namespace cute_kernels::format
