// Decompression of a tile in shared memory straight into A fragments ("split streams").
//
// A lane's nonzeros lie in its own column of the block (bank = lane: no conflicts at any row): low halves hold those of
// its even elements, high halves those of its odd ones. Four consecutive elements are four bytes of `word & (0x01010101
// << S)`, so one dp4a adds the bytes that count, times the row size, to a running address; one 16-bit load fetches the
// value with zeros above it; one multiplication turns four presence bits into two prmt selectors that take the values'
// bytes or those zeros. 3.5 instructions an element whatever the density, one of them a load. Absent elements re-read
// the last present one, or the row above the values, which is a bitmap row: always inside the block.
#pragma once

#include <cstdint>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/format/codec.hpp"

namespace cute_kernels::matmul {

using namespace cute;

// The lane's position in its two streams, as shared-memory addresses of the last value taken (counts are inclusive).
struct StreamCursor {
  uint32_t even, odd;
};

template <int HeadDim>
CUTE_DEVICE StreamCursor first_values(uint32_t lane_column) {
  uint32_t above = lane_column + (format::bitmap_rows(HeadDim) - 1) * format::kRowBytes;
  return {above, above + 2};
}

// Elements 4s .. 4s+3 of a lane's word, bits S, S+8, S+16, S+24: two registers of two halves.
template <int S>
CUTE_DEVICE void decompress4(uint32_t word, StreamCursor& at, uint32_t& r0, uint32_t& r1) {
  static_assert(format::Codec16::kStreams == 2 && format::kRowBytes == 128 && S <= 1);
  constexpr uint32_t kRow = format::kRowBytes >> S;  // a presence bit has the value 1 << S
  // Selectors of prmt, 16 bits for each register: the bytes of the values, or the upper, zero halves of their loads.
  constexpr uint32_t kTakeZeros = 0x76327632, kTakeValue = 0x22 >> S;

  uint32_t present = word & (0x01010101u << S);
  uint32_t selectors = kTakeZeros - present * kTakeValue;  // no byte borrows from the next
  uint32_t even0 = __dp4a(present, kRow, at.even), odd0 = __dp4a(present, kRow << 8, at.odd);
  at.even = __dp4a(present, kRow * 0x00010001u, at.even);
  at.odd = __dp4a(present, kRow * 0x01000100u, at.odd);
  r0 = ptx::permute_bytes(ptx::load_shared_u16(even0), ptx::load_shared_u16(odd0), selectors);
  r1 = ptx::permute_bytes(ptx::load_shared_u16(at.even), ptx::load_shared_u16(at.odd), selectors >> 16);
}

// Where the lane's values begin in one of kParts equal parts of the tile's elements: counts of the words before it.
template <int HeadDim, int kParts>
CUTE_DEVICE StreamCursor first_values_of_part(uint32_t lane_column, int part) {
  constexpr int kWords = format::bitmap_rows(HeadDim) / kParts;  // of a part
  constexpr uint32_t kEvenBytes = 0x6420, kOddBytes = 0x7531;
  StreamCursor at = first_values<HeadDim>(lane_column);
  if constexpr (kParts == 1) return at;
  int even = 0, odd = 0;
  CUTE_UNROLL
  for (int word = 0; word < (kParts - 1) * kWords; word += kWords < 2 ? 1 : 2) {
    if (word >= part * kWords) break;
    uint32_t word0 = ptx::load_shared_u32(lane_column + word * format::kRowBytes);
    uint32_t word1 = kWords < 2 ? 0 : ptx::load_shared_u32(lane_column + (word + 1) * format::kRowBytes);
    even += __popc(ptx::permute_bytes(word0, word1, kEvenBytes));
    odd += __popc(ptx::permute_bytes(word0, word1, kOddBytes));
  }
  return {at.even + even * format::kRowBytes, at.odd + odd * format::kRowBytes};
}

// One word of a lane, 32 elements, into 16 registers.
template <class Registers>
CUTE_DEVICE void decompress32(uint32_t word, StreamCursor& at, Registers& r) {
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    decompress4<0>(word, at, r(4 * i), r(4 * i + 1));
    decompress4<1>(word, at, r(4 * i + 2), r(4 * i + 3));
    word >>= 2;
  }
}

// Two words of a lane, 64 elements, into 32 registers. The second word's start comes from two popcounts, so that both
// dependency chains of dp4a run side by side (measured: 20.2 instead of 13.7 elements/clk/SM at 8 warps).
template <class Registers>
CUTE_DEVICE void decompress64(uint32_t word0, uint32_t word1, StreamCursor& at, Registers& r) {
  constexpr uint32_t kEven = 0x00ff00ffu;
  StreamCursor at1{at.even + format::kRowBytes * __popc(word0 & kEven),
                   at.odd + format::kRowBytes * __popc(word0 & ~kEven)};
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    decompress4<0>(word0, at, r(4 * i), r(4 * i + 1));
    decompress4<0>(word1, at1, r(16 + 4 * i), r(16 + 4 * i + 1));
    decompress4<1>(word0, at, r(4 * i + 2), r(4 * i + 3));
    decompress4<1>(word1, at1, r(16 + 4 * i + 2), r(16 + 4 * i + 3));
    word0 >>= 2, word1 >>= 2;
  }
  at = at1;
}

}  // namespace cute_kernels::matmul
