// The decoder of values of 8 and 4 bits under a bitmap, into A fragments in fp16.
//
// A lane's streams have words of their own in turn, in the lane's own column of the block (bank = lane: no conflicts at
// any row). Four consecutive elements of a stream, a quad, are two registers; their bits lie 4 apart in half a bitmap
// word. Of slots (SlotDecoder) a lane has one stream, to which both quads of an atom belong. One product of them says
// everything: its low half is the selector with which prmt puts the stream's next values in their places, and something
// that stands for nothing where a bit is not set; its top four bits are how many values that took. The next values are
// found by shifting two words of the stream together. The work is the same whatever the density. Of what is read behind
// a stream's end nothing is used.
#pragma once

#include <cstdint>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/format/codec/codec.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"
#include "cute_kernels/mma/decoder.hpp"

namespace cute_kernels::mma {

using namespace cute;

template <class Codec>
struct NarrowDecoder {
  using TileFormat = format::BitmapTile;
  static constexpr int kRowsBehind = Codec::kRowsBehind;

  struct Cursor {
    uint32_t words;                       // shared-memory address of the lane's first value word
    uint32_t bits[Codec::kStreams] = {};  // of each stream, before its next value

    CUTE_DEVICE void skip(int stream, uint32_t values) { bits[stream] += values * Codec::kValueBits; }
    CUTE_DEVICE int taken(int stream) const { return static_cast<int>(bits[stream] / Codec::kValueBits); }
  };

  // Where the lane's values begin in one of kParts equal parts of the tile's elements: counts of the words before it.
  // kAtOnce: as for Bitmap16Decoder.
  template <int kHeadDim, int kParts, bool kAtOnce = false>
  CUTE_DEVICE static Cursor first(uint32_t lane_column, int part) {
    constexpr int kWords = TileFormat::bitmap_rows(kHeadDim) / kParts;  // of a part
    Cursor at{lane_column + TileFormat::first_value_row<Codec>(kHeadDim) * format::kRowBytes};
    if constexpr (kAtOnce) {
      CUTE_UNROLL
      for (int i = 0; i < (kParts - 1) * kWords; ++i) {
        uint32_t word = i / kWords < part ? ptx::load_shared_u32(lane_column + i * format::kRowBytes) : 0;
        if constexpr (Codec::kStreams == 1) {
          at.skip(0, __popc(word));
        } else {
          at.skip(0, __popc(word & TileFormat::stream_bits(0)));
          at.skip(1, __popc(word & TileFormat::stream_bits(1)));
        }
      }
    } else if constexpr (kParts > 1) {
      CUTE_NO_UNROLL
      for (int before = 0; before < part; ++before, lane_column += kWords * format::kRowBytes) {
        CUTE_UNROLL
        for (int word = 0; word < kWords; word += 2) {
          uint32_t word0 = ptx::load_shared_u32(lane_column + word * format::kRowBytes);
          uint32_t word1 = kWords < 2 ? 0 : ptx::load_shared_u32(lane_column + (word + 1) * format::kRowBytes);
          if constexpr (Codec::kStreams == 1) {
            at.skip(0, __popc(word0) + (kWords < 2 ? 0 : __popc(word1)));
          } else {  // both streams of two words, each in a word of its own
            at.skip(0, __popc(ptx::blend(word0, word1 << 1, TileFormat::stream_bits(0))));
            at.skip(1, __popc(ptx::blend(word0, word1 >> 1, TileFormat::stream_bits(1))));
          }
        }
      }
    }
    return at;
  }

  template <class Registers>
  CUTE_DEVICE static void decode32(uint32_t word, Cursor& at, Registers& r) {
    decode_word(word, at, r, 0);
  }

  // Those of atoms `atom` and `atom + 1` of a word, 16, into 8 registers.
  template <class Registers>
  CUTE_DEVICE static void decode16(uint32_t word, int atom, Cursor& at, Registers& r) {
    static_assert(Codec::kStreams == 2);
    decode<0>(word, at, atom, r, -4 * atom);
    decode<1>(word, at, atom, r, -4 * atom);
  }

  // Where a lane has one stream: those of one atom, 8, into 4 registers.
  template <class Registers>
  CUTE_DEVICE static void decode8(uint32_t word, int atom, Cursor& at, Registers& r) {
    static_assert(Codec::kStreams == 1);
    decode<0>(word, at, atom, r, -4 * atom);
  }

  // One after the other: from quad to quad only a count is carried on, which takes one instruction.
  template <class Registers>
  CUTE_DEVICE static void decode64(uint32_t word0, uint32_t word1, Cursor& at, Registers& r) {
    decode_word(word0, at, r, 0);
    decode_word(word1, at, r, 16);
  }

 private:
  static_assert(Codec::kStreams <= 2 && Codec::kBitDistance == 4 && format::kRowBytes == 128);
  static constexpr int kAtoms = Codec::kStreams;  // whose values of a stream are found together: two quads

  // Into r(first) and behind.
  template <class Registers>
  CUTE_DEVICE static void decode_word(uint32_t word, Cursor& at, Registers& r, int first) {
    CUTE_UNROLL
    for (int atom = 0; atom < 4; atom += kAtoms) {
      decode<0>(word, at, atom, r, first);
      if constexpr (Codec::kStreams == 2) decode<1>(word, at, atom, r, first);
    }
  }

  // What prmt takes from where a bit is not set, and the selector of four values of which none is there.
  static constexpr uint32_t kNothing =
      Codec::kId == format::CodecId::kFp8 ? 0 : (1u << (Codec::kValueBits - 1)) * 0x01010101u;
  // The bits of a quad, 4 apart: the rank of a value among the quad's where its bit is set, or 4 to 7; in the top four
  // bits, how many are set.
  CUTE_DEVICE static uint32_t quad(uint32_t word, int atom, int stream) {
    constexpr uint32_t kFactor = 0x1111110cu;  // a multiple of 4: for bits one or two places up no shift is needed
    int place = 2 * (atom % 2) + stream;
    uint32_t half = word >> 16 * (atom / 2);
    uint32_t product = place < 3 ? (half & 0x1111u << place) * (kFactor >> place) : (half >> 3 & 0x1111u) * kFactor;
    return product + 0x4444u;
  }

  // A stream's elements of two atoms, from r(first + 4 * atom) on, or all of one atom. The next eight values serve both
  // quads, those of the second from the first one's count on.
  template <int S, class Registers>
  CUTE_DEVICE static void decode(uint32_t word, Cursor& at, int atom, Registers& r, int first) {
    constexpr uint32_t kFirst = S * format::kRowBytes,
                       kWord = Codec::kWordRows * format::kRowBytes;  // to the next word
    uint32_t product = quad(word, atom, S), product1 = kAtoms == 2 ? quad(word, atom + 1, S) : quad(word, atom, 1),
             count = product >> 28;
    uint32_t shift = at.bits[S];  // of which funnel shifts take what is beyond whole words
    uint32_t address = ptx::multiply_add(shift & ~31u, kWord / 32, at.words);
    uint32_t word0 = ptx::load_shared_word<kFirst>(address), word1 = ptx::load_shared_word<kFirst + kWord>(address);
    uint32_t low = __funnelshift_r(word0, word1, shift), bytes, bytes1;
    if constexpr (Codec::kValueBits == 8) {
      uint32_t high = __funnelshift_r(word1, ptx::load_shared_word<kFirst + 2 * kWord>(address), shift);
      bytes = low;
      bytes1 = ptx::permute_bytes(low, high, 0x3210u + 0x1111u * count);
    } else {
      uint32_t even = low & 0x0f0f0f0fu, odd = low >> 4 & 0x0f0f0f0fu;
      bytes = ptx::permute_bytes(even, odd, 0x5140u);
      bytes1 = ptx::permute_bytes(even, odd, 0x73625140u >> (4 * count));
    }
    at.skip(S, count + (product1 >> 28));
    int to = first + 4 * atom + 2 * S, to1 = to + 2 * kAtoms;
    to_halves(ptx::permute_bytes(bytes, kNothing, product), r(to), r(to + 1));
    to_halves(ptx::permute_bytes(bytes1, kNothing, product1), r(to1), r(to1 + 1));
  }

  // Four codes, a byte each, as fp16.
  CUTE_DEVICE static void to_halves(uint32_t codes, uint32_t& r0, uint32_t& r1) {
    if constexpr (Codec::kId == format::CodecId::kFp8) {
      ptx::e4m3_to_halves(codes, r0, r1);
    } else {  // 0x6400 is 1024, whose last place is 1
      constexpr uint32_t kBias = (0x6400u + (1u << (Codec::kValueBits - 1))) * 0x00010001u;
      r0 = ptx::subtract_halves(ptx::permute_bytes(codes, 0x64646464u, 0x4140u), kBias);
      r1 = ptx::subtract_halves(ptx::permute_bytes(codes, 0x64646464u, 0x4342u), kBias);
    }
  }
};

template <>
struct Decoder<format::BitmapTile, format::Fp8Codec> : NarrowDecoder<format::Fp8Codec> {};
template <>
struct Decoder<format::BitmapTile, format::Int8Codec> : NarrowDecoder<format::Int8Codec> {};
template <>
struct Decoder<format::BitmapTile, format::Int4Codec> : NarrowDecoder<format::Int4Codec> {};

}  // namespace cute_kernels::mma
