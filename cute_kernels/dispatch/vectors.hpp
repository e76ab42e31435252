// Which dense operands kernels may read 16 bytes at a time.
#pragma once

#include <cstdint>

#include "cute_kernels/ops/attention/problem.hpp"

namespace cute_kernels::dispatch {

// strides: of 16-bit elements, of all dimensions but the last, which is 1.
inline bool in_vectors(void const* data, int64_t const (&strides)[3]) {
  constexpr int kVector = 8;
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides[0] % kVector == 0 && strides[1] % kVector == 0 &&
         strides[2] % kVector == 0;
}

inline bool in_vectors(attention::Window const& window) {
  return in_vectors(window.keys, window.key_strides) && in_vectors(window.values, window.value_strides);
}

}  // namespace cute_kernels::dispatch
