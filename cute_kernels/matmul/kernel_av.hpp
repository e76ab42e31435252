// sparse_av: O^T = V^T P^T over a warp's tiles. What differs from one architecture to another is the pipeline that
// feeds it.
#pragma once

#include "cute_kernels/matmul/combine.hpp"
#include "cute_kernels/matmul/load_probabilities.hpp"
#include "cute_kernels/matmul/mainloop.hpp"

namespace cute_kernels::matmul {

// kConverts: p is not in the type of V.
template <class Traits, class Pipeline, bool kConverts>
__global__ void __launch_bounds__(32 * Traits::kMaxWarps, 1) sparse_av_kernel(CUTE_GRID_CONSTANT Params const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int last_segment[Traits::kMaxWarps];
  using TiledMma = typename Traits::TiledMma;
  ptx::launch_dependents();
  int warp = threadIdx.x / 32;
  TileRange piece = piece_tiles(params.work, blockIdx.x * (blockDim.x / 32) + warp);
  Ring ring(params.stages, shared, warp);
  Pipeline pipeline(params, ring, piece);

  auto thr_mma = TiledMma{}.get_slice(threadIdx.x % 32);
  Tensor cB = make_identity_tensor(Shape<Int<Traits::kN>, Int<Traits::kK>>{});
  Tensor tCrB = make_tensor<typename Traits::Element>(shape(thr_mma.partition_B(cB)));  // (MMA,MMA_N,MMA_K)
  for (int tile = piece.begin; tile < piece.end;) {
    Segment segment = segment_at<Traits::kN>(params.work, params.work.tiles_per_segment.div(tile));
    Tensor tCrC = partition_fragment_C(TiledMma{}, Shape<Int<Traits::kM>, Int<Traits::kN>>{});  // (MMA,MMA_M,MMA_N)
    clear(tCrC);
    ProbabilityLoader<Traits, kConverts> probabilities;
    CUTE_NO_UNROLL
    for (int end = min(segment.tiles.end, piece.end); tile < end; ++tile) {
      Stage stage = pipeline.next();
      probabilities.load(params, segment, stage, tCrB, tCrC);
      multiply_tile<Traits>(cast_smem_ptr_to_uint(stage.block), tCrB, tCrC);
    }
    probabilities.finish(tCrC);
    finish_segment<Traits>(params, segment, piece, tCrC, reinterpret_cast<float4*>(ring.data), last_segment + warp);
  }
  __syncthreads();
  finish_cta<Traits>(params, shared, last_segment);
}

}  // namespace cute_kernels::matmul
