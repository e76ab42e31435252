// What every codec shares: its number, and where its values are in the rows of a block.
#pragma once

#include <cstdint>

#include "cute_kernels/common/dtype.hpp"
#include "cute_kernels/format/tile/tile.hpp"

namespace cute_kernels::format {

enum class CodecId : int { kFp16 = 0, kBf16 = 1, kFp8 = 2, kInt8 = 3, kInt4 = 4 };

// Values of so many bits. Of 16 bits: both of a lane's streams have half of its word in every value row, a value each.
// Of fewer, narrow ones: the streams take turns, and have the whole word in every other value row. The earlier values
// of a word are in its lower bits.
template <int ValueBits>
struct CodecBits {
  static constexpr int kValueBits = ValueBits;
  static constexpr bool kIsNarrow = ValueBits < 16;
  static_assert(ValueBits == 16 || ValueBits == 8 || ValueBits == 4);
  static constexpr int kStreams = 32 / kStreamBits;                   // of a lane
  static constexpr int kWordValues = kIsNarrow ? 32 / ValueBits : 1;  // of a stream in a word
  static constexpr int kWordRows = kIsNarrow ? kStreams : 1;          // from a word of a stream to its next
  static constexpr int kBitDistance = kIsNarrow ? 4 : 8;              // see BitmapTile::bitmap_bit
  // Of a block, that a decoder may read without using them.
  static constexpr int kRowsBehind = (ValueBits == 8 ? 3 : 2) * kWordRows;

  // Rows of a tile whose longest stream has `longest` values, and what a stream may have in so many rows.
  CUTE_HOST_DEVICE static constexpr int value_rows(int longest) {
    return (longest + kWordValues - 1) / kWordValues * kWordRows;
  }
  CUTE_HOST_DEVICE static constexpr int most_values(int value_rows) { return value_rows / kWordRows * kWordValues; }

  // Where the value of some rank in its stream is.
  CUTE_HOST_DEVICE static constexpr int value_row(int stream, int rank) {
    return rank / kWordValues * kWordRows + (kIsNarrow ? stream : 0);
  }
  CUTE_HOST_DEVICE static constexpr int first_bit(int stream, int rank) {
    return kIsNarrow ? rank % kWordValues * kValueBits : stream * kStreamBits;
  }
  CUTE_HOST_DEVICE static constexpr uint32_t place(uint32_t value, int stream, int rank) {
    return value << first_bit(stream, rank);
  }
  CUTE_HOST_DEVICE static constexpr uint32_t extract(uint32_t word, int stream, int rank) {
    return (word >> first_bit(stream, rank)) & ((1u << kValueBits) - 1);
  }
};

// A narrow codec where a lane has one stream, with its whole word in every value row.
template <class Codec>
struct OneStream : Codec {
  static_assert(Codec::kIsNarrow);
  static constexpr int kStreams = 1, kWordRows = 1;
  static constexpr int kRowsBehind = Codec::kRowsBehind / Codec::kWordRows;

  CUTE_HOST_DEVICE static constexpr int value_rows(int longest) {
    return (longest + Codec::kWordValues - 1) / Codec::kWordValues;
  }
  CUTE_HOST_DEVICE static constexpr int most_values(int value_rows) { return value_rows * Codec::kWordValues; }
  CUTE_HOST_DEVICE static constexpr int value_row(int, int rank) { return rank / Codec::kWordValues; }
};

}  // namespace cute_kernels::format
