// sparse_av by warps: O^T = V^T P^T, a tile of values to a warp at a time.
#pragma once

#include "cute_kernels/mma/warp/multiply_tile.hpp"
#include "cute_kernels/ops/av/load_probabilities.hpp"
#include "cute_kernels/reduce/policies.hpp"

namespace cute_kernels::av {

template <class Traits>
using OutputShape = reduce::OutputShape<Traits::kHeadDim, Traits::kN>;
template <class Traits>
using Partial = reduce::Sum::Partial<OutputShape<Traits>>;

// A warp's accumulators of all channels.
template <class Traits, class Fragment>
CUTE_DEVICE void store_partial(Fragment const& tCrC /* (MMA,MMA_M,MMA_N) */, int rows, Partial<Traits>* to) {
  reduce::store_vectors<OutputShape<Traits>, OutputShape<Traits>::kChannelBlocks>(
      to->vectors, rows, 0,
      [&](int m, int n) { return make_float4(tCrC(0, m, n), tCrC(1, m, n), tCrC(2, m, n), tCrC(3, m, n)); });
}

// All tiles of a warp's split, as `pipeline` loads them. kConverts: p is not in the type of V. store(tCrC, work_tile)
// takes the sums of every work tile.
template <class Traits, bool kConverts, class Schedule, class Pipeline, class Store>
CUTE_DEVICE void multiply_values(Params const& params, Schedule const& schedule, schedule::Range split,
                                 Pipeline& pipeline, Store&& store) {
  using TiledMma = typename Traits::TiledMma;
  auto thr_mma = TiledMma{}.get_slice(threadIdx.x % 32);
  Tensor cB = make_identity_tensor(Shape<Int<Traits::kN>, Int<Traits::kK>>{});
  Tensor tCrB = make_tensor<typename Traits::Element>(shape(thr_mma.partition_B(cB)));  // (MMA,MMA_N,MMA_K)
  for (int tile = split.begin; tile < split.end;) {
    schedule::WorkTile work_tile = schedule.work_tile_with(tile);
    Tensor tCrC = partition_fragment_C(TiledMma{}, Shape<Int<Traits::kM>, Int<Traits::kN>>{});  // (MMA,MMA_M,MMA_N)
    clear(tCrC);
    ProbabilityLoader<Traits, kConverts> probabilities;
    CUTE_NO_UNROLL
    for (int end = min(work_tile.tiles.end, split.end); tile < end; ++tile) {
      Stage stage = pipeline.next(work_tile, tile);
      probabilities.load(params, work_tile, stage, tCrB, tCrC);
      mma::multiply_tile<Traits>(cast_smem_ptr_to_uint(stage.block), tCrB, tCrC);
      pipeline.release();
    }
    probabilities.finish(tCrC);
    if constexpr (Traits::kHasScales) mma::scale_channels<false>(tCrC, params.channel_scale(work_tile), 0);
    store(tCrC, work_tile);
  }
}

}  // namespace cute_kernels::av
