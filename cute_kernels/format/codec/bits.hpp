// What every codec shares: its number, and where its values are in the rows of a stream.
#pragma once

#include <cstdint>

#include "cute_kernels/common/dtype.hpp"
#include "cute_kernels/format/tile/tile.hpp"

namespace cute_kernels::format {

enum class CodecId : int { kFp16 = 0, kBf16 = 1, kE4m3 = 2 };

// Values of so many bits: that of rank r in its stream is in value row r / kValuesPerRow, the earlier ones of a row in
// its lower bits.
template <int ValueBits>
struct CodecBits {
  static_assert(ValueBits <= kStreamBits && kStreamBits % ValueBits == 0, "a row holds whole values");
  static constexpr int kValueBits = ValueBits;
  static constexpr int kValuesPerRow = kStreamBits / ValueBits;

  // Rows of a tile whose longest stream has `longest` values.
  CUTE_HOST_DEVICE static constexpr int value_rows(int longest) {
    return (longest + kValuesPerRow - 1) / kValuesPerRow;
  }
  CUTE_HOST_DEVICE static constexpr int first_bit(int stream, int rank) {
    return stream * kStreamBits + rank % kValuesPerRow * kValueBits;
  }
  CUTE_HOST_DEVICE static constexpr uint32_t place(uint32_t value, int stream, int rank) {
    return value << first_bit(stream, rank);
  }
  CUTE_HOST_DEVICE static constexpr uint32_t extract(uint32_t word, int stream, int rank) {
    return (word >> first_bit(stream, rank)) & ((1u << kValueBits) - 1);
  }
};

}  // namespace cute_kernels::format
