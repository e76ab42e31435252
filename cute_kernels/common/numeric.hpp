// Conversions between the 16-bit storage types and float, in the form the kernels use them.
#pragma once

#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/numeric_types.hpp>

#include "cute_kernels/common/dtype.hpp"

namespace cute_kernels {

using cute::bfloat16_t;
using cute::half_t;

// Calls f with a value of the C++ type that `dtype` names.
template <class F>
CUTE_HOST_DEVICE decltype(auto) visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(half_t{});
    case DType::kBFloat16:
      return f(bfloat16_t{});
    default:
      return f(float{});
  }
}

CUTE_HOST_DEVICE constexpr int dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// A number of float16 or bfloat16 by its bits, where a kernel is the same for both.
CUTE_DEVICE float from_half_bits(uint16_t bits, DType dtype) {
  return dtype == DType::kFloat16 ? float(half_t::bitcast(bits)) : float(bfloat16_t::bitcast(bits));
}
CUTE_DEVICE uint16_t to_half_bits(float x, DType dtype) {
  return dtype == DType::kFloat16 ? half_t(x).raw() : bfloat16_t(x).raw();
}

// Magnitudes as ordered integers: every NaN is one key above infinity.
CUTE_HOST_DEVICE constexpr uint32_t nan_key(DType dtype) { return dtype == DType::kFloat16 ? 0x7c01u : 0x7f81u; }
CUTE_HOST_DEVICE constexpr uint32_t magnitude_key(uint16_t bits, uint32_t nan_key) {
  uint32_t magnitude = bits & 0x7fffu;
  return magnitude < nan_key ? magnitude : nan_key;
}

}  // namespace cute_kernels
