// How one stored value is coded: the seam between the tile's structure and its number format.
#pragma once

#include <cstdint>

#include "cute_kernels/format/tile.hpp"

namespace cute_kernels::format {

// A lane has as many value streams as values fit into a 32-bit word: element e belongs to stream e % kStreams.
template <int ValueBits>
struct Codec {
  static constexpr int kValueBits = ValueBits;
  static constexpr int kStreams = 32 / ValueBits;

  CUTE_HOST_DEVICE static constexpr int stream(int element) { return element % kStreams; }
  CUTE_HOST_DEVICE static constexpr uint32_t place(uint32_t value, int stream) {
    return value << (stream * kValueBits);
  }
  CUTE_HOST_DEVICE static constexpr uint32_t extract(uint32_t word, int stream) {
    return (word >> (stream * kValueBits)) & ((uint64_t{1} << kValueBits) - 1);
  }
};

using Codec16 = Codec<16>;  // fp16 and bf16, stored bit for bit

// Bits of a bitmap word that are of one stream.
CUTE_HOST_DEVICE constexpr uint32_t stream_bits(int stream) {
  uint32_t bits = 0;
  for (int e = 0; e < kWordElements; ++e)
    if (Codec16::stream(e) == stream) bits |= 1u << bitmap_bit(e);
  return bits;
}

// Rows of a tile whose longest stream has `longest` values, and the most that any pattern of a tile can need.
CUTE_HOST_DEVICE constexpr int tile_rows(int head_dim, int longest) { return bitmap_rows(head_dim) + longest; }
template <class C>
CUTE_HOST_DEVICE constexpr int max_tile_rows(int head_dim) {
  return tile_rows(head_dim, lane_elements(head_dim) / C::kStreams);
}

}  // namespace cute_kernels::format
