// sparse_qk by warpgroups: S^T = K Q^T, a tile of keys to a warpgroup at a time.
#pragma once

#include "cute_kernels/mma/warpgroup/multiply_tile.hpp"
#include "cute_kernels/ops/product/sm90/warpgroup_worker.hpp"
#include "cute_kernels/ops/qk/sm90_params.hpp"
#include "cute_kernels/ops/qk/warpgroup/store_logits.hpp"

namespace cute_kernels::qk::sm90 {

using namespace cute;
using product::Stage;
using product::sm90::Warpgroup;

// Q as WGMMA reads it, channels in the order of the head's compressed channels. Channels beyond the last are zeros;
// rows beyond the last repeat it, are computed and never stored.
template <class Traits, class TensorB>
CUTE_DEVICE void load_queries(Params const& params, schedule::WorkTile const& work_tile, int thread,
                              TensorB&& sB /* (BLK_N,BLK_K) */) {
  using Element = typename Traits::Element;
  constexpr int kPairs = Traits::kHeadDim / 2, kRowsAtOnce = mma::kWarpgroupThreads / kPairs;
  static_assert(kRowsAtOnce > 0 && Traits::kN % kRowsAtOnce == 0);
  int column = thread % kPairs * 2, head_dim = params.sparse.head_dim;
  uint8_t const* channel_order = params.channel_order(work_tile);
  int channel0 = __ldg(channel_order + Traits::TileFormat::position_of_column(column));
  int channel1 = __ldg(channel_order + Traits::TileFormat::position_of_column(column + 1));
  auto const* head = static_cast<Element const*>(params.dense.data) + params.head_offset(work_tile);
#pragma unroll 16
  for (int row = thread / kPairs; row < Traits::kN; row += kRowsAtOnce) {
    auto const* q = head + params.row_offset(work_tile.first_row + min(row, work_tile.rows - 1));
    alignas(4) Element pair[2] = {channel0 < head_dim ? q[channel0] : Element(0.f),
                                  channel1 < head_dim ? q[channel1] : Element(0.f)};
    *reinterpret_cast<uint32_t*>(&sB(row, column)) = *reinterpret_cast<uint32_t const*>(pair);
  }
  ptx::compiler_fence();  // the library's fence does not say that it orders memory
  cutlass::arch::fence_view_async_shared();
}

// All tiles of a warpgroup's split. A tile's logits are stored while the next tile is multiplied.
template <class Traits, bool kWide, class Schedule>
CUTE_DEVICE void multiply_keys(Params const& params, Schedule const& schedule, WarpgroupStorage<Traits>& storage,
                               Warpgroup& warpgroup) {
  typename Traits::TiledMma mma;
  Tensor sB = make_tensor(make_smem_ptr(storage.b), typename Traits::SmemLayoutB{})(_, _, 0);  // (BLK_N,BLK_K)
  auto thr_mma = mma.get_slice(warpgroup.thread());
  Tensor tCrB = thr_mma.make_fragment_B(thr_mma.partition_B(sB));  // (MMA,MMA_N,MMA_K)
  using Writer = LogitsWriter<Traits, kWide>;
  for (int tile = warpgroup.split.begin; tile < warpgroup.split.end;) {
    schedule::WorkTile work_tile = schedule.work_tile_with(tile);
    warpgroup.sync();  // everyone has multiplied by q, and stored all logits, of the work tile before
    load_queries<Traits>(params, work_tile, warpgroup.thread(), sB);
    Writer logits(params, work_tile, tile, storage, warpgroup.warp);
    int buffer = 0;
    bool is_first = true;
    CUTE_NO_UNROLL
    for (int end = min(work_tile.tiles.end, warpgroup.split.end); tile < end; ++tile, buffer ^= 1, is_first = false) {
      Stage stage(params.stages, warpgroup.reader.wait());
      int token = stage.token_order[Writer::position_of_lane(warpgroup.warp)];
      typename Traits::Quarter quarter(cast_smem_ptr_to_uint(stage.block), warpgroup.warp);
      Tensor tCrC = partition_fragment_C(mma, Shape<Int<Traits::kM>, Int<Traits::kN>>{});  // ((2,2,N/8),1,1)
      CUTE_UNROLL
      for (int step = 0; step < Traits::kSteps; ++step) {
        Tensor tCrA = mma::decode_step<Traits>(quarter, step);
        if (step == 0) warpgroup.sync();  // q is there, and so are all logits of the tile before
        mma::multiply_step<Traits>(step, tCrA, tCrB, tCrC);
        if (step + 1 == Traits::kSteps) warpgroup.reader.release();
        if (step + 1 == Traits::kSteps && !is_first) logits.store(buffer ^ 1);
        warpgroup_wait<0>();
        warpgroup_fence_operand(tCrA);  // its registers have been read only now
      }
      warpgroup_fence_operand(tCrC);
      if constexpr (kWide) warpgroup.sync();  // those of the tile before have been stored
      logits.stage(buffer, token, tCrC);
    }
    warpgroup.sync();
    logits.store(buffer ^ 1);
  }
}

// kWide: logits of 32 bits.
template <class Traits, bool kWide>
__global__ void __launch_bounds__(pipeline::kMaxThreads<Traits::kMaxWarpgroups>, 1)
    sparse_qk_warpgroups(CUTE_GRID_CONSTANT RingParams const params) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  using Storage = WarpgroupStorage<Traits>;
  product::sm90::run_warpgroups<Traits, Storage, schedule::ProductPolicy<Traits::kN>, NoDenseLoad>(
      params, bytes, [&](auto const& schedule, Warpgroup& warpgroup, Storage& storage) {
        multiply_keys<Traits, kWide>(params, schedule, storage, warpgroup);
      });
}

}  // namespace cute_kernels::qk::sm90
