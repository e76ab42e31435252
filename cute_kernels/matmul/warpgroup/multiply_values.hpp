// sparse_av by warpgroups: O^T = V^T P^T, a tile of values to a warpgroup at a time.
#pragma once

#include "cute_kernels/matmul/combine.hpp"
#include "cute_kernels/matmul/warpgroup/load_probabilities.hpp"
#include "cute_kernels/matmul/warpgroup/mma.hpp"

namespace cute_kernels::matmul::warpgroup {

// All tiles of a warpgroup's piece. kConverts: p is not in the type of V. Leaves a partial of every segment.
template <class Traits, bool kConverts>
CUTE_DEVICE void multiply_values(TmaParams const& params, ValueStorage<Traits>& storage, Worker& worker) {
  typename Traits::TiledMma mma;
  Tensor sB = make_tensor(make_smem_ptr(storage.b), typename Traits::SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
  auto thr_mma = mma.get_slice(worker.thread());
  Tensor tCrB = thr_mma.make_fragment_B(thr_mma.partition_B(sB));  // (MMA,MMA_N,MMA_K,PIPE)
  int buffer = 0, turn = kTurns - 1;
  for (int tile = worker.piece.begin; tile < worker.piece.end;) {
    Segment segment = segment_at<Traits::kN>(params.work, params.work.tiles_per_segment.div(tile));
    Tensor tCrC = partition_fragment_C(mma, Shape<Int<Traits::kM>, Int<Traits::kN>>{});  // (MMA,MMA_M,MMA_N)
    clear(tCrC);
    ProbabilityLoader<Traits, kConverts> probabilities(storage, worker.warp);
    CUTE_NO_UNROLL
    for (int first = tile, end = min(segment.tiles.end, worker.piece.end); tile < end; ++tile, buffer ^= 1) {
      turn = turn == kTurns - 1 ? 0 : turn + 1;
      Stage stage(params.stages, worker.reader.wait());
      probabilities.put_in_order(params, segment, tile, worker.warp, stage, sB(_, _, buffer), turn);
      QuarterTile<Traits> quarter(stage.block, worker.warp);
      CUTE_UNROLL
      for (int step = 0; step < Traits::kSteps; ++step) {
        Tensor tCrA = quarter.decompress(step);
        if (step == 0) {
          worker.sync();  // p is in order, and the buffer written next has been read by everyone
          probabilities.rescale(tile == first, turn, tCrC);
        }
        multiply_step<Traits>(step, tCrA, tCrB(_, _, _, buffer), tCrC);
        if (step + 1 == Traits::kSteps) worker.reader.release();
        warpgroup_wait<0>();
      }
      warpgroup_fence_operand(tCrC);
    }
    probabilities.finish(turn, tCrC);
    leave_partial<Traits>(params, segment, worker.piece, blockIdx.x * params.ring.workers.divisor + worker.index,
                          worker.warp, tCrC);
  }
}

template <class Traits, bool kConverts>
__global__ void __launch_bounds__(sm90::kMaxThreads<Traits::kMaxWarpgroups>, 1)
    sparse_av_warpgroups(CUTE_GRID_CONSTANT TmaParams const params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  ptx::launch_dependents();
  run_warpgroups<Traits>(params, bytes, [&](Worker& worker, ValueStorage<Traits>& storage) {
    multiply_values<Traits, kConverts>(params, storage, worker);
  });
}

}  // namespace cute_kernels::matmul::warpgroup
