// The decoder of exactly two of four: a value's place is known, so decoding is a conversion.
#pragma once

#include <cstdint>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/format/codec/codec.hpp"
#include "cute_kernels/format/tile/two_of_four.hpp"
#include "cute_kernels/mma/decoder.hpp"

namespace cute_kernels::mma {

using namespace cute;

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
    } else if constexpr (Codec::kId == format::CodecId::kFp8) {
      ptx::e4m3_to_halves(words[0], a[0], a[1]);
      ptx::e4m3_to_halves(words[1], a[2], a[3]);
    } else if constexpr (Codec::kValueBits == 8) {  // 0x6400 is 1024, whose last place is 1
      constexpr uint32_t kBias = (0x6400u + Codec::kOffset) * 0x00010001u;
      CUTE_UNROLL
      for (int r = 0; r < TileFormat::kAtomGroups; ++r)
        a[r] = ptx::subtract_halves(ptx::permute_bytes(words[r / 2], 0x64646464u, r % 2 ? 0x4342u : 0x4140u), kBias);
    } else {
      // As Marlin (arXiv 2408.11743) does it: two nibbles become the last places of 1024, or those of 16 times that.
      static_assert(Codec::kValueBits == 4);
      constexpr uint32_t kBias = (0x6400u + Codec::kOffset) * 0x00010001u;
      constexpr uint32_t kSixteenth = 0x2c002c00u, kHighBias = 0xd480d480u;  // 1 / 16 and -(64 + kOffset)
      static_assert(Codec::kOffset == 8);
      CUTE_UNROLL
      for (int r = 0; r < TileFormat::kAtomGroups; r += 2) {
        uint32_t word = words[0] >> (4 * r);  // of registers r and r + 1: the lower byte of each half
        a[r] = ptx::subtract_halves(ptx::and_or(word, 0x000f000fu, 0x64006400u), kBias);
        a[r + 1] = ptx::multiply_add_halves(ptx::and_or(word, 0x00f000f0u, 0x64006400u), kSixteenth, kHighBias);
      }
    }
  }
};

template <class Codec>
struct Decoder<format::TwoOfFourTile, Codec> : PairDecoder<Codec> {};

}  // namespace cute_kernels::mma
