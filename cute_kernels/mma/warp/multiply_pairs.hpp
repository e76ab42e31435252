// The main loop of a tile of exactly two of four by one warp: convert, multiply by mma.sp.
#pragma once

#include "cute_kernels/mma/warp/traits.hpp"

namespace cute_kernels::mma {

// As multiply_tile_part, which calls it.
template <class Traits, int kParts, class FragmentB, class FragmentC>
CUTE_DEVICE void multiply_pairs_part(uint32_t block, int part, FragmentB const& tCrB /* ((2,2),MMA_N,16 columns) */,
                                     FragmentC& tCrC /* (MMA,MMA_M of the part,MMA_N) */) {
  using TileFormat = typename Traits::TileFormat;
  using Decoder = typename Traits::Decoder;
  using Mma = format::SparseMma_16x8x32<typename Traits::Element>;
  constexpr int kBlocks = Traits::kM / 16 / kParts, kAlongK = Traits::kK / 32;
  constexpr int kAtomBytes = Decoder::kRows * format::kRowBytes;
  static_assert(kAlongK % 2 == 0, "metadata of atoms comes in pairs");
  CUTE_STATIC_ASSERT_V(size<1>(tCrC) == Int<kBlocks>{});
  CUTE_STATIC_ASSERT_V(size<2>(tCrC) == Int<Traits::kN / 8>{});
  CUTE_STATIC_ASSERT_V(size<2>(tCrB) == Int<2 * kAlongK>{});
  Tensor b = recast<uint32_t>(tCrB);  // (2,MMA_N,16 columns)

  uint32_t column = block + 4 * (threadIdx.x % 32);
  uint32_t metadata = column + part * kBlocks * (kAlongK / 2) * format::kRowBytes;
  uint32_t values = column +
                    TileFormat::template first_value_row<typename Traits::Codec>(Traits::kHeadDim) * format::kRowBytes +
                    part * kBlocks * kAlongK * kAtomBytes;
  CUTE_UNROLL
  for (int pair = 0; pair < kAlongK / 2; ++pair) {
    // Blocks of rows alternate, so that an mma does not wait for the one before.
    CUTE_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      uint32_t e = ptx::load_shared_u32(metadata + (m * (kAlongK / 2) + pair) * format::kRowBytes);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        uint32_t a[TileFormat::kAtomGroups];
        int k = 2 * pair + i;
        Decoder::load(values + (m * kAlongK + k) * kAtomBytes, a);
        CUTE_UNROLL
        for (int n = 0; n < Traits::kN / 8; ++n) {
          Tensor d = tCrC(_, m, n);
          if (i == 0)
            Mma::template fma<0>(d(0), d(1), d(2), d(3), a[0], a[1], a[2], a[3], b(0, n, 2 * k), b(1, n, 2 * k),
                                 b(0, n, 2 * k + 1), b(1, n, 2 * k + 1), e);
          else
            Mma::template fma<1>(d(0), d(1), d(2), d(3), a[0], a[1], a[2], a[3], b(0, n, 2 * k), b(1, n, 2 * k),
                                 b(0, n, 2 * k + 1), b(1, n, 2 * k + 1), e);
        }
      }
    }
  }
}

}  // namespace cute_kernels::mma
