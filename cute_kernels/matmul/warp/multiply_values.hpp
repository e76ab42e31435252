// sparse_av by warps: O^T = V^T P^T, a tile of values to a warp at a time.
#pragma once

#include "cute_kernels/matmul/combine.hpp"
#include "cute_kernels/matmul/warp/load_probabilities.hpp"
#include "cute_kernels/matmul/warp/mainloop.hpp"

namespace cute_kernels::matmul {

// All tiles of a warp's piece, as `pipeline` brings them. kConverts: p is not in the type of V. Hands the share of the
// segment that the piece ends in to pipeline.finish() and returns that segment.
template <class Traits, bool kConverts, class Pipeline>
CUTE_DEVICE int multiply_values(Params const& params, TileRange piece, Pipeline& pipeline) {
  using TiledMma = typename Traits::TiledMma;
  auto thr_mma = TiledMma{}.get_slice(threadIdx.x % 32);
  Tensor cB = make_identity_tensor(Shape<Int<Traits::kN>, Int<Traits::kK>>{});
  Tensor tCrB = make_tensor<typename Traits::Element>(shape(thr_mma.partition_B(cB)));  // (MMA,MMA_N,MMA_K)
  for (int tile = piece.begin;;) {
    Segment segment = segment_at<Traits::kN>(params.work, params.work.tiles_per_segment.div(tile));
    Tensor tCrC = partition_fragment_C(TiledMma{}, Shape<Int<Traits::kM>, Int<Traits::kN>>{});  // (MMA,MMA_M,MMA_N)
    clear(tCrC);
    ProbabilityLoader<Traits, kConverts> probabilities;
    CUTE_NO_UNROLL
    for (int end = min(segment.tiles.end, piece.end); tile < end; ++tile) {
      Stage stage = pipeline.next();
      probabilities.load(params, segment, stage, tCrB, tCrC);
      multiply_tile<Traits>(cast_smem_ptr_to_uint(stage.block), tCrB, tCrC);
      pipeline.release();
    }
    probabilities.finish(tCrC);
    if (tile == piece.end) {
      pipeline.finish(tCrC, segment.rows);
      return segment.index;
    }
    leave_share<Traits>(tCrC, segment.rows, partial_data<Traits>(params, crossing_partial(segment)));
  }
}

}  // namespace cute_kernels::matmul
