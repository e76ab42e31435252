// The decoder of 16-bit values under a bitmap ("split streams").
//
// A lane's nonzeros lie in its own column of the block (bank = lane: no conflicts at any row), in two streams: the low
// halves hold those of its registers of columns 2t and 2t + 1, the high halves those of columns 2t + 8 and 2t + 9. Four
// consecutive elements of a stream are two registers and four bytes of `word & (0x01010101 << S)`, so one dp4a adds the
// bytes, times the row size, to a running address. Where the address was, the next two values are all that the first
// register can need; where it is now, the last two are all that the second can. 16-bit loads fetch them with zeros
// above, and presence bits become selectors of prmt, which takes a value's bytes or those zeros. The work is the same
// whatever the density. What a register does not need may be any value, or a row of the bitmap above the values, or one
// of kRowsBehind rows behind the block.
#pragma once

#include <cstdint>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/format/codec/codec.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"
#include "cute_kernels/mma/decoder.hpp"

namespace cute_kernels::mma {

using namespace cute;

struct Bitmap16Decoder {
  using TileFormat = format::BitmapTile;
  static constexpr int kRowsBehind = format::Fp16Codec::kRowsBehind;

  // The lane's position in its two streams, as shared-memory addresses of the last value taken (counts are inclusive).
  struct Cursor {
    uint32_t low, high;
  };

  // Where the lane's values begin in one of kParts equal parts of the tile's elements: counts of the words before it.
  // Streams have every other bit, so two words are counted at once. kAtOnce: words of all parts are loaded side by side,
  // which takes less time where a warp waits for it and more where others have work meanwhile, as when decoding.
  template <int kHeadDim, int kParts, bool kAtOnce = false>
  CUTE_DEVICE static Cursor first(uint32_t lane_column, int part) {
    constexpr int kWords = TileFormat::bitmap_rows(kHeadDim) / kParts;  // of a part
    uint32_t above = lane_column + (TileFormat::bitmap_rows(kHeadDim) - 1) * format::kRowBytes;
    Cursor at{above, above + 2};
    if constexpr (kParts == 1) return at;
    int low = 0, high = 0;
    if constexpr (kAtOnce) {
      uint32_t words[((kParts - 1) * kWords + 1) / 2 * 2] = {};
      CUTE_UNROLL
      for (int i = 0; i < (kParts - 1) * kWords; ++i)
        if (i / kWords < part) words[i] = ptx::load_shared_u32(lane_column + i * format::kRowBytes);
      CUTE_UNROLL
      for (int i = 0; i < (kParts - 1) * kWords; i += 2) {
        low += __popc(ptx::blend(words[i], words[i + 1] << 1, TileFormat::stream_bits(0)));
        high += __popc(ptx::blend(words[i], words[i + 1] >> 1, TileFormat::stream_bits(1)));
      }
    } else {
      // A loop is not predicated: loads that no lane makes would take an issue slot at shared memory all the same.
      CUTE_NO_UNROLL
      for (int before = 0; before < part; ++before, lane_column += kWords * format::kRowBytes) {
        CUTE_UNROLL
        for (int word = 0; word < kWords; word += 2) {
          uint32_t word0 = ptx::load_shared_u32(lane_column + word * format::kRowBytes);
          uint32_t word1 = kWords < 2 ? 0 : ptx::load_shared_u32(lane_column + (word + 1) * format::kRowBytes);
          low += __popc(ptx::blend(word0, word1 << 1, TileFormat::stream_bits(0)));
          high += __popc(ptx::blend(word0, word1 >> 1, TileFormat::stream_bits(1)));
        }
      }
    }
    return {at.low + low * format::kRowBytes, at.high + high * format::kRowBytes};
  }

  template <class Registers>
  CUTE_DEVICE static void decode32(uint32_t word, Cursor& at, Registers& r) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      decode4<0>(word, at.low, r(4 * i), r(4 * i + 1));
      decode4<1>(word, at.high, r(4 * i + 2), r(4 * i + 3));
      word >>= 2;
    }
  }

  // The second word's start comes from two popcounts, so that both dependency chains of dp4a run side by side.
  template <class Registers>
  CUTE_DEVICE static void decode64(uint32_t word0, uint32_t word1, Cursor& at, Registers& r) {
    Cursor at1{at.low + format::kRowBytes * __popc(word0 & TileFormat::stream_bits(0)),
               at.high + format::kRowBytes * __popc(word0 & TileFormat::stream_bits(1))};
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      decode4<0>(word0, at.low, r(4 * i), r(4 * i + 1));
      decode4<0>(word1, at1.low, r(16 + 4 * i), r(16 + 4 * i + 1));
      decode4<1>(word0, at.high, r(4 * i + 2), r(4 * i + 3));
      decode4<1>(word1, at1.high, r(16 + 4 * i + 2), r(16 + 4 * i + 3));
      word0 >>= 2, word1 >>= 2;
    }
    at = at1;
  }

 private:
  // Four elements of a stream, bits S, S + 8, S + 16, S + 24 of a lane's word: two registers of two halves.
  template <int S>
  CUTE_DEVICE static void decode4(uint32_t word, uint32_t& at, uint32_t& r0, uint32_t& r1) {
    static_assert(TileFormat::kStreams == 2 && format::kRowBytes == 128 && S <= 1);
    constexpr uint32_t kRow = format::kRowBytes >> S;  // a presence bit has the value 1 << S
    uint32_t present = word & (0x01010101u << S);
    uint32_t before = at;
    at = __dp4a(present, kRow * 0x01010101u, at);

    // Bytes 0 and 1 of prmt are the first of two values, 4 and 5 the second; 2, 3, 6 and 7 are zeros.
    //
    // First register: its first element takes the first value or zeros. So does its second, or the second value if the
    // first is present. A product tells them from the low bytes alone, and an IMAD takes half the issue slots of an
    // IDP.
    constexpr uint32_t kZeros0 = 0x3232, kTake0 = 0x43de >> S;  // 0x4400 - 0x22
    r0 = ptx::permute_bytes(ptx::load_shared_u16(before + format::kRowBytes),
                            ptx::load_shared_u16(before + 2 * format::kRowBytes), present * kTake0 + kZeros0);
    // Second register: its second element takes the last value or zeros. So does its first if the second is absent;
    // else it takes the last value but one.
    constexpr uint32_t kZeros1 = 0x7676;
    constexpr uint32_t kTake1 = static_cast<uint16_t>(-(0x0022 >> S)) | static_cast<uint32_t>(-(0x2244 >> S)) << 16;
    r1 = ptx::permute_bytes(ptx::load_shared_u16(at - format::kRowBytes), ptx::load_shared_u16(at),
                            ptx::dot2_high(kTake1, present, kZeros1));
  }
};

template <>
struct Decoder<format::BitmapTile, format::Fp16Codec> : Bitmap16Decoder {};
template <>
struct Decoder<format::BitmapTile, format::Bf16Codec> : Bitmap16Decoder {};

}  // namespace cute_kernels::mma
