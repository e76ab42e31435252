// The main loop of a tile by one warp, on every architecture with mma.sync: decode, multiply.
#pragma once

#include "cute_kernels/mma/decoder.hpp"
#include "cute_kernels/mma/warp/multiply_pairs.hpp"
#include "cute_kernels/mma/warp/traits.hpp"

namespace cute_kernels::mma {

// multiply_tile_part of the bitmap format.
template <class Traits, int kParts, class FragmentB, class FragmentC>
CUTE_DEVICE void multiply_bitmap_part(uint32_t block, int part, FragmentB const& tCrB /* (MMA,MMA_N,MMA_K) */,
                                      FragmentC& tCrC /* (MMA,MMA_M of the part,MMA_N) */) {
  using Element = typename Traits::Element;
  constexpr int kAtoms = Traits::kStepAtoms;
  constexpr int kStepRows = kAtoms > Traits::kAtomsAlongK ? kAtoms / Traits::kAtomsAlongK : 1;  // blocks of 16 along M
  using Decoder = typename Traits::Decoder;
  MMA_Atom<WarpMmaOp<Element>> mma;
  constexpr int kSteps = Traits::kSteps / kParts;
  static_assert(kSteps * kParts == Traits::kSteps, "parts are whole k-steps");
  CUTE_STATIC_ASSERT_V(size<1>(tCrC) == Int<Traits::kM / 16 / kParts>{});
  CUTE_STATIC_ASSERT_V(size<2>(tCrC) == Int<Traits::kN / 8>{});
  CUTE_STATIC_ASSERT_V(size<2>(tCrB) == Int<Traits::kK / 16>{});

  uint32_t column = block + 4 * (threadIdx.x % 32);
  auto at = Decoder::template first<Traits::kHeadDim, kParts>(column, part);
  column += part * 2 * kSteps * format::kRowBytes;
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, Int<kAtoms>>{});  // (MMA,ATOMS)
    Tensor registers = coalesce(recast<uint32_t>(tCrA));                          // (32)
    CUTE_STATIC_ASSERT_V(size(registers) == Int<32>{});
    uint32_t word0 = ptx::load_shared_u32(column + 2 * step * format::kRowBytes);
    uint32_t word1 = ptx::load_shared_u32(column + (2 * step + 1) * format::kRowBytes);
    Decoder::decode64(word0, word1, at, registers);
    CUTE_UNROLL
    for (int j = 0; j < kAtoms; ++j) {
      // Atoms run along K first. The rows of a k-step alternate, so that an mma does not wait for the one before.
      int i = j % kStepRows * (kAtoms / kStepRows) + j / kStepRows, atom = step * kAtoms + i;
      int m = atom / Traits::kAtomsAlongK, k = atom % Traits::kAtomsAlongK;
      CUTE_UNROLL
      for (int n = 0; n < Traits::kN / 8; ++n) cute::gemm(mma, tCrA(_, i), tCrB(_, n, k), tCrC(_, m, n));
    }
  }
}

// accumulators += part * B, where the part is one of kParts equal ones of the tile's rows along M, and `block` the
// tile's block in shared memory.
template <class Traits, int kParts, class FragmentB, class FragmentC>
CUTE_DEVICE void multiply_tile_part(uint32_t block, int part, FragmentB const& tCrB /* (MMA,MMA_N,MMA_K) */,
                                    FragmentC& tCrC /* (MMA,MMA_M of the part,MMA_N) */) {
  if constexpr (std::is_same_v<typename Traits::TileFormat, format::TwoOfFourTile>)
    multiply_pairs_part<Traits, kParts>(block, part, tCrB, tCrC);
  else if constexpr (std::is_same_v<typename Traits::TileFormat, format::TwoOfFourBitmapTile>)
    multiply_slots_part<Traits, kParts>(block, part, tCrB, tCrC);
  else
    multiply_bitmap_part<Traits, kParts>(block, part, tCrB, tCrC);
}

// accumulators += tile * B
template <class Traits, class FragmentB, class FragmentC>
CUTE_DEVICE void multiply_tile(uint32_t block, FragmentB const& tCrB /* (MMA,MMA_N,MMA_K) */,
                               FragmentC& tCrC /* (MMA,MMA_M,MMA_N) */) {
  multiply_tile_part<Traits, 1>(block, 0, tCrB, tCrC);
}

}  // namespace cute_kernels::mma
