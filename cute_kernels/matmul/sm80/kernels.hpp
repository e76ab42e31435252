// The kernels of CC 8.x: every warp fetches and multiplies the tiles of its own piece.
#pragma once

#include "cute_kernels/matmul/sm80/pipeline.hpp"
#include "cute_kernels/matmul/warp/multiply_keys.hpp"
#include "cute_kernels/matmul/warp/multiply_values.hpp"

namespace cute_kernels::matmul::sm80 {

CUTE_DEVICE TileRange piece_of_warp(Work const& work) {
  return piece_tiles(work, blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
}

template <class Traits>
__global__ void __launch_bounds__(32 * Traits::kMaxWarps, 1) sparse_qk_kernel(CUTE_GRID_CONSTANT Params const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  TileRange piece = piece_of_warp(params.work);
  WarpPipeline<Traits> pipeline(params, shared, threadIdx.x / 32, piece);
  multiply_keys<Traits>(params, piece, pipeline);
}

// kConverts: p is not in the type of V.
template <class Traits, bool kConverts>
__global__ void __launch_bounds__(32 * Traits::kMaxWarps, 1) sparse_av_kernel(CUTE_GRID_CONSTANT Params const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int last_segment[Traits::kMaxWarps];
  ptx::launch_dependents();
  TileRange piece = piece_of_warp(params.work);
  WarpPipeline<Traits> pipeline(params, shared, threadIdx.x / 32, piece);
  last_segment[threadIdx.x / 32] = multiply_values<Traits, kConverts>(params, piece, pipeline);
  __syncthreads();
  add_up_shares<Traits>(params, shared, params.stages.count * params.stages.stage_bytes, last_segment, blockDim.x / 32,
                        threadIdx.x);
}

}  // namespace cute_kernels::matmul::sm80
