// Floats as words and vectors of 16-bit elements, in device code.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <type_traits>

#include "cute_kernels/common/numeric.hpp"

namespace cute_kernels {

// Two numbers as a word of elements; as bits, of `dtype`.
template <class Element>
CUTE_DEVICE uint32_t to_pair(float x, float y, [[maybe_unused]] DType dtype = {}) {
  if constexpr (std::is_same_v<Element, uint16_t>) {
    return dtype == DType::kFloat16 ? to_pair<half_t>(x, y) : to_pair<bfloat16_t>(x, y);
  } else {
    cutlass::Array<float, 2> pair;
    pair[0] = x, pair[1] = y;
    auto converted = cutlass::NumericArrayConverter<Element, float, 2>{}(pair);
    return *reinterpret_cast<uint32_t const*>(&converted);
  }
}

// 16 bytes of elements.
template <class Element>
CUTE_DEVICE uint4 to_vector(cutlass::Array<float, 8> const& x) {
  auto converted = cutlass::NumericArrayConverter<Element, float, 8>{}(x);
  return *reinterpret_cast<uint4 const*>(&converted);
}

}  // namespace cute_kernels
