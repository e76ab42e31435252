// sparse_qk by warpgroups: S^T = K Q^T, a tile of keys to a warpgroup at a time.
#pragma once

#include "cute_kernels/matmul/warpgroup/mma.hpp"
#include "cute_kernels/matmul/warpgroup/store_logits.hpp"

namespace cute_kernels::matmul::warpgroup {

// Q as WGMMA reads it, channels in the order of the head's compressed channels. Channels beyond the last are zeros;
// rows beyond the last repeat it, are computed and never stored.
template <class Traits, class TensorB>
CUTE_DEVICE void load_queries(Params const& params, Segment const& segment, int thread,
                              TensorB&& sB /* (BLK_N,BLK_K) */) {
  using Element = typename Traits::Element;
  constexpr int kPairs = Traits::kHeadDim / 2, kRowsAtOnce = kWarpgroupThreads / kPairs;
  static_assert(kRowsAtOnce > 0 && Traits::kN % kRowsAtOnce == 0);
  int column = thread % kPairs * 2, head_dim = params.sparse.head_dim;
  uint8_t const* channel_order = params.sparse.channel_order + int64_t{segment.head} * Traits::kHeadDim;
  int channel0 = __ldg(channel_order + format::position_of_column(column));
  int channel1 = __ldg(channel_order + format::position_of_column(column + 1));
  auto const* head =
      static_cast<Element const*>(params.dense.data) + dense_head_offset(params.dense, params.work, segment.head);
#pragma unroll 16
  for (int row = thread / kPairs; row < Traits::kN; row += kRowsAtOnce) {
    auto const* q = head + dense_row_offset(params.dense, params.work, segment.first_row + min(row, segment.rows - 1));
    alignas(4) Element pair[2] = {channel0 < head_dim ? q[channel0] : Element(0.f),
                                  channel1 < head_dim ? q[channel1] : Element(0.f)};
    *reinterpret_cast<uint32_t*>(&sB(row, column)) = *reinterpret_cast<uint32_t const*>(pair);
  }
  ptx::compiler_fence();  // the library's fence does not say that it orders memory
  cutlass::arch::fence_view_async_shared();
}

// All tiles of a warpgroup's piece. A tile's logits are stored while the next tile is multiplied.
template <class Traits, bool kWide>
CUTE_DEVICE void multiply_keys(TmaParams const& params, KeyStorage<Traits>& storage, Worker& worker) {
  typename Traits::TiledMma mma;
  Tensor sB = make_tensor(make_smem_ptr(storage.b), typename Traits::SmemLayoutB{})(_, _, 0);  // (BLK_N,BLK_K)
  auto thr_mma = mma.get_slice(worker.thread());
  Tensor tCrB = thr_mma.make_fragment_B(thr_mma.partition_B(sB));  // (MMA,MMA_N,MMA_K)
  using Writer = LogitsWriter<Traits, kWide>;
  for (int tile = worker.piece.begin; tile < worker.piece.end;) {
    Segment segment = segment_at<Traits::kN>(params.work, params.work.tiles_per_segment.div(tile));
    worker.sync();  // everyone has multiplied by q, and stored all logits, of the segment before
    load_queries<Traits>(params, segment, worker.thread(), sB);
    Writer logits(params, segment, tile, storage, worker.warp);
    int turn = 0;
    bool is_first = true;
    CUTE_NO_UNROLL
    for (int end = min(segment.tiles.end, worker.piece.end); tile < end; ++tile, turn ^= 1, is_first = false) {
      Stage stage(params.stages, worker.reader.wait());
      int token = stage.token_order[Writer::position_of_lane(worker.warp)];
      QuarterTile<Traits> quarter(stage.block, worker.warp);
      Tensor tCrC = partition_fragment_C(mma, Shape<Int<Traits::kM>, Int<Traits::kN>>{});  // ((2,2,N/8),1,1)
      CUTE_UNROLL
      for (int step = 0; step < Traits::kSteps; ++step) {
        Tensor tCrA = quarter.decompress(step);
        if (step == 0) worker.sync();  // q is there, and so are all logits of the tile before
        multiply_step<Traits>(step, tCrA, tCrB, tCrC);
        if (step + 1 == Traits::kSteps) worker.reader.release();
        if (step + 1 == Traits::kSteps && !is_first) logits.store(turn ^ 1);
        warpgroup_wait<0>();
        warpgroup_fence_operand(tCrA);  // its registers have been read only now
      }
      warpgroup_fence_operand(tCrC);
      if constexpr (kWide) worker.sync();  // those of the tile before have been stored
      logits.put(turn, token, tCrC);
    }
    worker.sync();
    logits.store(turn ^ 1);
  }
}

// kWide: logits of 32 bits.
template <class Traits, bool kWide>
__global__ void __launch_bounds__(sm90::kMaxThreads<Traits::kMaxWarpgroups>, 1)
    sparse_qk_warpgroups(CUTE_GRID_CONSTANT TmaParams const params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  run_warpgroups<Traits>(params, bytes, [&](Worker& worker, KeyStorage<Traits>& storage) {
    multiply_keys<Traits, kWide>(params, storage, worker);
  });
}

}  // namespace cute_kernels::matmul::warpgroup
