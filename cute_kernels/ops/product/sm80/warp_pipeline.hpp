// The load side of the products on CC 8.x: every warp owns stages in shared memory and fills them with cp.async.
//
// Warps never wait for one another: a warp fetches, waits for and consumes its own tiles, so that many warps at
// different points hide one another's latencies.
#pragma once

#include "cute_kernels/ops/product/params.hpp"
#include "cute_kernels/ops/product/stage.hpp"
#include "cute_kernels/pipeline/cp_async.hpp"
#include "cute_kernels/schedule/schedule.hpp"

namespace cute_kernels::product::sm80 {

// DenseRows: fetch(work_tile, tile, stage) copies what comes with a tile beside its block and order; work_tile is that
// of the tile.
template <class SchedulePolicy, class DenseRows>
class WarpPipeline {
 public:
  // Starts the fetch of the first tiles of this warp's split.
  CUTE_DEVICE WarpPipeline(Params const& params, schedule::Schedule<SchedulePolicy> const& schedule, uint8_t* shared,
                           int warp, schedule::Range split, DenseRows const& dense_rows)
      : params_(params),
        schedule_(schedule),
        stages_(params.stages, shared, warp),
        lane_(threadIdx.x % 32),
        policy_(ptx::evict_first_policy()),
        split_(split),
        next_(split.begin),
        dense_rows_(dense_rows) {
    load_row_offsets();
    for (int i = 0; i < params.stages.count - 1; ++i) fetch();
  }

  // Waits for the warp's next tile, starts the fetch into the stage that was read last, and returns the tile's stage.
  // Arguments: the tile, which is the next one.
  CUTE_DEVICE Stage next(schedule::WorkTile const&, int) {
    stages_.wait();
    __syncwarp();  // every lane's copies have arrived, and every lane has read the stage before
    Stage stage = stage_at(stages_.advance_read());
    fetch();
    return stage;
  }

  // The stage has been read; the next fetch but one fills it.
  CUTE_DEVICE void release() {}

 private:
  Params const& params_;
  schedule::Schedule<SchedulePolicy> const& schedule_;
  pipeline::CpAsyncStages stages_;
  int lane_;
  uint64_t policy_;
  schedule::Range split_;
  int next_;  // the tile to fetch
  DenseRows dense_rows_;
  int fetch_stage_ = 0;
  int rows_begin_ = 0, rows_end_ = 0;  // lane i: of the i-th of 32 tiles, so that no fetch waits for its offsets

  CUTE_DEVICE Stage stage_at(int index) const { return {params_.stages, stages_[index]}; }

  // Fills the next stage with the warp's next tile. Always commits a group, so that groups count tiles.
  CUTE_DEVICE void fetch() {
    if (next_ < split_.end) {
      Stage stage = stage_at(fetch_stage_);
      fetch_block(stage.block);
      pipeline::copy_order_async(stage.token_order,
                                 params_.sparse.token_order + params_.storage_tile(next_) * kOrderBytes, lane_);
      dense_rows_.fetch(schedule_.work_tile_with(next_), next_, stage);
      if ((++next_ - split_.begin) % 32 == 0) load_row_offsets();
    }
    cute::cp_async_fence();
    fetch_stage_ = fetch_stage_ + 1 == params_.stages.count ? 0 : fetch_stage_ + 1;
  }

  CUTE_DEVICE void load_row_offsets() {
    int tile = next_ + lane_;
    if (tile >= split_.end) return;
    int64_t index = params_.storage_tile(tile);
    rows_begin_ = __ldg(params_.sparse.row_offsets + index);
    rows_end_ = __ldg(params_.sparse.row_offsets + index + 1);
  }

  CUTE_DEVICE void fetch_block(uint8_t* block) {
    int index = (next_ - split_.begin) % 32;
    int begin = __shfl_sync(~0u, rows_begin_, index), end = __shfl_sync(~0u, rows_end_, index);
    pipeline::copy_block_async<32, 4>(block, params_.sparse.blocks + int64_t{begin} * format::kLanes,
                                      (end - begin) * format::kRowBytes, lane_, policy_);
  }
};

}  // namespace cute_kernels::product::sm80
