// The decoder of exactly two of four: a value's place is known, so decoding is a conversion.
#pragma once

#include <cstdint>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/format/codec/codec.hpp"
#include "cute_kernels/format/tile/two_of_four.hpp"
#include "cute_kernels/mma/decoder.hpp"

namespace cute_kernels::mma {

using namespace cute;

// Selectors by which prmt takes a group's four elements from its two values and zeros: the first two elements by the lower
// half, the others by the upper half. metadata: of the group.
CUTE_HOST_DEVICE constexpr uint32_t group_selectors(uint32_t metadata) {
  uint32_t first = (0x44u ^ 0x10u) << 8 * (metadata & 3), second = (0x44u ^ 0x32u) << 8 * (metadata >> 2);
  return 0x44444444u ^ first ^ second;
}

template <class Codec>
struct PairDecoder {
  using TileFormat = format::TwoOfFourTile;
  static constexpr int kRowsBehind = 0;
  static constexpr int kRows = TileFormat::kAtomGroups * TileFormat::kKept * Codec::kValueBits / 32;  // of an atom

  // An atom's A fragment, in fp16 if the codec has scales: numbers of codes. values: shared-memory address of the lane's
  // word in its first row.
  CUTE_DEVICE static void load(uint32_t values, uint32_t (&a)[TileFormat::kAtomGroups]) {
    uint32_t words[kRows];
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) words[row] = ptx::load_shared_u32(values + row * format::kRowBytes);
    if constexpr (Codec::kValueBits == 16) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) a[r] = words[r];
    } else {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half)
        convert(Codec::kValueBits == 8 ? words[half % kRows] : words[0] >> kHalfBits * half, a[2 * half],
                a[2 * half + 1]);
    }
  }

  // Of narrow codecs: registers 2 h and 2 h + 1 of an atom, whose rows are 8 apart. word: with 8 bits a value the atom's
  // row h, with 4 its only one shifted right by kHalfBits * h.
  static constexpr int kHalfBits = 8;
  CUTE_DEVICE static void convert(uint32_t word, uint32_t& a0, uint32_t& a1) {
    if constexpr (Codec::kId == format::CodecId::kFp8) {
      ptx::e4m3_to_halves(word, a0, a1);
    } else {  // 0x6400 is 1024, whose last place is 1
      constexpr uint32_t kBias = (0x6400u + Codec::kOffset) * 0x00010001u;
      if constexpr (Codec::kValueBits == 8) {
        a0 = ptx::subtract_halves(ptx::permute_bytes(word, 0x64646464u, 0x4140u), kBias);
        a1 = ptx::subtract_halves(ptx::permute_bytes(word, 0x64646464u, 0x4342u), kBias);
      } else {
        // As Marlin (arXiv 2408.11743) does it: two nibbles become the last places of 1024, or those of 16 times that.
        static_assert(Codec::kValueBits == 4 && Codec::kOffset == 8);
        constexpr uint32_t kSixteenth = 0x2c002c00u, kHighBias = 0xd480d480u;  // 1 / 16 and -(64 + kOffset)
        a0 = ptx::subtract_halves(ptx::and_or(word, 0x000f000fu, 0x64006400u), kBias);
        a1 = ptx::multiply_add_halves(ptx::and_or(word, 0x00f000f0u, 0x64006400u), kSixteenth, kHighBias);
      }
    }
  }
};

template <class Codec>
struct Decoder<format::TwoOfFourTile, Codec> : PairDecoder<Codec> {};

}  // namespace cute_kernels::mma
