// sparse_av by warpgroups: O^T = V^T P^T, a tile of values to a warpgroup at a time.
#pragma once

#include "cute_kernels/mma/warpgroup/multiply_tile.hpp"
#include "cute_kernels/ops/av/multiply_values.hpp"
#include "cute_kernels/ops/av/warpgroup/load_probabilities.hpp"
#include "cute_kernels/ops/product/sm90/warpgroup_worker.hpp"

namespace cute_kernels::av::sm90 {

using product::sm90::Warpgroup;

// All tiles of a warpgroup's split. kConverts: p is not in the type of V. Stores a partial of every work tile.
template <class Traits, bool kConverts, class Schedule>
CUTE_DEVICE void multiply_values(RingParams const& params, Schedule const& schedule, WarpgroupStorage<Traits>& storage,
                                 Warpgroup& warpgroup) {
  typename Traits::TiledMma mma;
  Tensor sB = make_tensor(make_smem_ptr(storage.b), typename Traits::SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
  auto thr_mma = mma.get_slice(warpgroup.thread());
  Tensor tCrB = thr_mma.make_fragment_B(thr_mma.partition_B(sB));  // (MMA,MMA_N,MMA_K,PIPE)
  int buffer = 0, exponents = kExponentBuffers - 1;
  for (int tile = warpgroup.split.begin; tile < warpgroup.split.end;) {
    schedule::WorkTile work_tile = schedule.work_tile_with(tile);
    Tensor tCrC = partition_fragment_C(mma, Shape<Int<Traits::kM>, Int<Traits::kN>>{});  // (MMA,MMA_M,MMA_N)
    clear(tCrC);
    WarpgroupProbabilityLoader<Traits, kConverts> probabilities(storage, warpgroup.warp);
    CUTE_NO_UNROLL
    for (int first = tile, end = min(work_tile.tiles.end, warpgroup.split.end); tile < end; ++tile, buffer ^= 1) {
      exponents = exponents == kExponentBuffers - 1 ? 0 : exponents + 1;
      Stage stage(params.stages, warpgroup.reader.wait());
      probabilities.load(params, work_tile, tile, warpgroup.warp, stage, sB(_, _, buffer), exponents);
      typename Traits::Quarter quarter(cast_smem_ptr_to_uint(stage.block), warpgroup.warp);
      CUTE_UNROLL
      for (int step = 0; step < Traits::kSteps; ++step) {
        Tensor tCrA = mma::decode_step<Traits>(quarter, step);
        if (step == 0) {
          warpgroup.sync();  // p is in order, and the buffer written next has been read by everyone
          probabilities.rescale(tile == first, exponents, tCrC);
        }
        mma::multiply_step<Traits>(step, tCrA, tCrB(_, _, _, buffer), tCrC);
        if (step + 1 == Traits::kSteps) warpgroup.reader.release();
        warpgroup_wait<0>();
      }
      warpgroup_fence_operand(tCrC);
    }
    probabilities.finish(exponents, tCrC);
    int split = blockIdx.x * params.ring.workers.divisor + warpgroup.index;
    reduce::store_vectors<OutputShape<Traits>, Traits::kBlocksM>(
        reduce::partial<Partial<Traits>>(params.output, split, work_tile.index)->vectors, work_tile.rows,
        warpgroup.warp, [&](int m, int n) {
          return make_float4(tCrC(4 * n, m, 0), tCrC(4 * n + 1, m, 0), tCrC(4 * n + 2, m, 0), tCrC(4 * n + 3, m, 0));
        });
  }
}

template <class Traits, bool kConverts>
__global__ void __launch_bounds__(pipeline::kMaxThreads<Traits::kMaxWarpgroups>, 1)
    sparse_av_warpgroups(CUTE_GRID_CONSTANT RingParams const params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  ptx::launch_dependents();
  using Storage = WarpgroupStorage<Traits>;
  product::sm90::run_warpgroups<Traits, Storage, schedule::ProductPolicy<Traits::kN>, PLoad>(
      params, bytes, [&](auto const& schedule, Warpgroup& warpgroup, Storage& storage) {
        multiply_values<Traits, kConverts>(params, schedule, storage, warpgroup);
      });
}

}  // namespace cute_kernels::av::sm90
