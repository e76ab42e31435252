// The main loop of a tile by a warpgroup (CC 9.0a): decode into the A registers of WGMMA, a quarter from each warp.
#pragma once

#include "cute_kernels/mma/warpgroup/traits.hpp"

namespace cute_kernels::mma {

// A fragments of a k-step's words of this warp's quarter of a tile, (MMA,1,ATOMS).
template <class Traits>
CUTE_DEVICE auto decode_step(typename Traits::Quarter& quarter, int step) {
  Tensor tCrA = make_tensor<typename Traits::Element>(Shape<Shape<_2, _2, _2>, _1, Int<Traits::kStepAtoms>>{});
  Tensor registers = coalesce(recast<uint32_t>(tCrA));
  CUTE_STATIC_ASSERT_V(size(registers) == Int<4 * Traits::kStepAtoms>{});
  quarter.decode(step, registers);
  return tCrA;
}

// tCrC += the k-step's atoms times B; of keys, whose accumulators are a tile's, the first atom begins the sum. Does not
// wait.
template <class Traits, class FragmentA, class FragmentB, class FragmentC>
CUTE_DEVICE void multiply_step(int step, FragmentA const& tCrA /* (MMA,1,ATOMS) */,
                               FragmentB const& tCrB /* (MMA,MMA_N,MMA_K) */, FragmentC& tCrC /* (MMA,MMA_M,MMA_N) */) {
  CUTE_STATIC_ASSERT_V(size<1>(tCrB) == _1{});
  CUTE_STATIC_ASSERT_V(size<2>(tCrB) == Int<Traits::kAtomsAlongK>{});
  CUTE_STATIC_ASSERT_V(size<1>(tCrC) == Int<Traits::kBlocksM>{});
  typename Traits::TiledMma mma;
  warpgroup_fence_operand(tCrC);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int i = 0; i < size<2>(tCrA); ++i) {
    int atom = step * Traits::kStepAtoms + i, m = atom / Traits::kAtomsAlongK, k = atom % Traits::kAtomsAlongK;
    if constexpr (Traits::kIsKey) mma.accumulate_ = k == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
    cute::gemm(mma, tCrA(_, 0, i), tCrB(_, 0, k), tCrC(_, m, 0));
  }
  warpgroup_commit_batch();
}

// tCrC += tile * B, or of keys = tile * B. `block`: the tile's block in shared memory. used(): all loads from it are done.
template <class Traits, class FragmentB, class FragmentC, class Used>
CUTE_DEVICE void multiply_tile_by_warpgroup(uint32_t block, int warp, FragmentB const& tCrB /* (MMA,MMA_N,MMA_K) */,
                                            FragmentC&& tCrC /* ((2,2,N/8),MMA_M,MMA_N) */, Used&& used) {
  typename Traits::Quarter quarter(block, warp);
  CUTE_UNROLL
  for (int step = 0; step < Traits::kSteps; ++step) {
    Tensor tCrA = decode_step<Traits>(quarter, step);
    multiply_step<Traits>(step, tCrA, tCrB, tCrC);
    if (step + 1 == Traits::kSteps) used();
    warpgroup_wait<0>();
    warpgroup_fence_operand(tCrA);  // its registers have been read only now
  }
  warpgroup_fence_operand(tCrC);
}

}  // namespace cute_kernels::mma
