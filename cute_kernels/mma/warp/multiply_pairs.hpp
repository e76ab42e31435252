// The main loops of a tile of two of four by one warp: convert or decode, multiply by mma.sp.
#pragma once

#include "cute_kernels/mma/warp/traits.hpp"

namespace cute_kernels::mma {

// d += a b for an atom of A: block m of rows, block k of 32 columns. e: metadata of it and of its neighbour along K.
template <class Traits, class FragmentB, class FragmentC>
CUTE_DEVICE void multiply_sparse_atom(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t e, int m, int k,
                                      FragmentB const& b /* (2,MMA_N,16 columns) */,
                                      FragmentC& tCrC /* (MMA,MMA_M of the part,MMA_N) */) {
  using Mma = format::SparseMma_16x8x32<typename Traits::Element>;
  CUTE_UNROLL
  for (int n = 0; n < Traits::kN / 8; ++n) {
    Tensor d = tCrC(_, m, n);
    if (k % 2 == 0)
      Mma::template fma<0>(d(0), d(1), d(2), d(3), a0, a1, a2, a3, b(0, n, 2 * k), b(1, n, 2 * k), b(0, n, 2 * k + 1),
                           b(1, n, 2 * k + 1), e);
    else
      Mma::template fma<1>(d(0), d(1), d(2), d(3), a0, a1, a2, a3, b(0, n, 2 * k), b(1, n, 2 * k), b(0, n, 2 * k + 1),
                           b(1, n, 2 * k + 1), e);
  }
}

// As multiply_tile_part, which calls it.
template <class Traits, int kParts, class FragmentB, class FragmentC>
CUTE_DEVICE void multiply_pairs_part(uint32_t block, int part, FragmentB const& tCrB /* ((2,2),MMA_N,16 columns) */,
                                     FragmentC& tCrC /* (MMA,MMA_M of the part,MMA_N) */) {
  using TileFormat = typename Traits::TileFormat;
  using Decoder = typename Traits::Decoder;
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
        multiply_sparse_atom<Traits>(a[0], a[1], a[2], a[3], e, m, k, b, tCrC);
      }
    }
  }
}

// The same of at most two of four: two bitmap words at a time, or the part's only one.
template <class Traits, int kParts, class FragmentB, class FragmentC>
CUTE_DEVICE void multiply_slots_part(uint32_t block, int part, FragmentB const& tCrB /* ((2,2),MMA_N,16 columns) */,
                                     FragmentC& tCrC /* (MMA,MMA_M of the part,MMA_N) */) {
  using TileFormat = typename Traits::TileFormat;
  using Decoder = typename Traits::Decoder;
  constexpr int kBlocks = Traits::kM / 16 / kParts, kAlongK = Traits::kK / 32, kAtoms = kBlocks * kAlongK;
  constexpr int kWordAtoms = 4, kWords = kAtoms / kWordAtoms, kStepWords = cute::min(kWords, 2);
  constexpr int kStepAtoms = kStepWords * kWordAtoms, kStepBlocks = cute::max(1, kStepAtoms / kAlongK);
  static_assert(kAlongK % 2 == 0, "metadata of atoms comes in pairs");
  static_assert(kWords * kParts == TileFormat::bitmap_rows(Traits::kHeadDim) && kWords % kStepWords == 0);
  CUTE_STATIC_ASSERT_V(size<1>(tCrC) == Int<kBlocks>{});
  CUTE_STATIC_ASSERT_V(size<2>(tCrC) == Int<Traits::kN / 8>{});
  CUTE_STATIC_ASSERT_V(size<2>(tCrB) == Int<2 * kAlongK>{});
  Tensor b = recast<uint32_t>(tCrB);  // (2,MMA_N,16 columns)

  uint32_t column = block + 4 * (threadIdx.x % 32);
  auto at = Decoder::template first<Traits::kHeadDim, kParts>(column, part);
  uint32_t metadata = column + part * (kAtoms / 2) * format::kRowBytes;
  uint32_t bitmap = column + (TileFormat::metadata_rows(Traits::kHeadDim) + part * kWords) * format::kRowBytes;
  CUTE_UNROLL
  for (int step = 0; step < kWords / kStepWords; ++step) {
    uint32_t word[kStepWords], e[kStepAtoms / 2];
    CUTE_UNROLL
    for (int i = 0; i < kStepWords; ++i)
      word[i] = ptx::load_shared_u32(bitmap + (step * kStepWords + i) * format::kRowBytes);
    CUTE_UNROLL
    for (int i = 0; i < kStepAtoms / 2; ++i)
      e[i] = ptx::load_shared_u32(metadata + (step * kStepAtoms / 2 + i) * format::kRowBytes);
    Tensor a = make_tensor<uint32_t>(Int<4 * kStepAtoms>{});
    if constexpr (kStepWords == 2)
      Decoder::decode64(word[0], word[1], at, a);
    else
      Decoder::decode32(word[0], at, a);
    CUTE_UNROLL
    for (int j = 0; j < kStepAtoms; ++j) {
      // Atoms run along K first. Blocks of rows alternate, so that an mma does not wait for the one before.
      int i = j % kStepBlocks * (kStepAtoms / kStepBlocks) + j / kStepBlocks, atom = step * kStepAtoms + i;
      multiply_sparse_atom<Traits>(a(4 * i), a(4 * i + 1), a(4 * i + 2), a(4 * i + 3), e[i / 2], atom / kAlongK,
                                   atom % kAlongK, b, tCrC);
    }
  }
}

}  // namespace cute_kernels::mma
