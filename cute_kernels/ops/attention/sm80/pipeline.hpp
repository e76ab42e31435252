// The load side of attention on CC 8.x: every worker owns stages in shared memory, which its warps fill together with
// cp.async.
#pragma once

#include "cute_kernels/ops/attention/stage.hpp"
#include "cute_kernels/ops/attention/worker.hpp"
#include "cute_kernels/pipeline/cp_async.hpp"

namespace cute_kernels::attention::sm80 {

template <class Traits>
class WorkerPipeline {
 public:
  static constexpr bool kCombinesInCluster = false;

  // Starts the fetch of the first stages. shared: of all workers.
  CUTE_DEVICE WorkerPipeline(Params const& params, typename Traits::Schedule const& schedule, uint8_t* shared,
                             Worker<Traits> const& worker, schedule::Range split)
      : params_(params),
        schedule_(schedule),
        stages_(params.stages, shared, worker.index),
        worker_(worker),
        split_(split) {
    look_up();
    for (int i = 0; i < params.stages.count - 1; ++i) fetch(i);
  }

  // Waits for the worker's next stage and starts the fetch into the one that was read last.
  CUTE_DEVICE Stage next() {
    stages_.wait();
    worker_.sync();  // every thread's copies have arrived, and every one has read the stage before
    int read = stages_.advance_read();
    Stage stage = stage_at(read);
    fetch(stages_.before(read));
    return stage;
  }

  // The scales of a tile's values, which come with its keys.
  CUTE_DEVICE uint8_t const* value_scales(Stage const& keys) const { return keys.value_scales; }

  // The stage has been read; the fetch after next fills it, after a barrier of the worker's warps.
  CUTE_DEVICE void release(bool = false) {}

 private:
  Params const& params_;
  typename Traits::Schedule const& schedule_;
  pipeline::CpAsyncStages stages_;
  Worker<Traits> const& worker_;
  schedule::Range split_;
  int number_ = 0;  // of the stage to fetch next: keys and values of a KV tile in turn
  // Of lane i: what fills the i-th of 32 stages, so that no fetch waits for its offsets.
  void const* from_ = nullptr;
  int bytes_ = 0, tile_ = -1;
  int scale_row_ = 0;  // of the values of the tile of keys

  CUTE_DEVICE Stage stage_at(int index) const { return {params_.stages, stages_[index]}; }

  CUTE_DEVICE void look_up() {
    int number = number_ + ptx::lane_index(), kv_tile = split_.begin + number / 2;
    tile_ = -1, bytes_ = 0;
    if (kv_tile >= split_.end) return;
    schedule::WorkTile work_tile = schedule_.work_tile_with(kv_tile);
    bool is_value = number % 2;
    StageSource<Traits> source(params_, work_tile, kv_tile, is_value);
    if (source.window_tokens > 0) {
      Window const& window = params_.window;
      int token = (kv_tile - work_tile.tiles.begin) * schedule::kWindowTileTokens;
      int64_t elements = window_offset(work_tile, is_value ? window.value_strides : window.key_strides, token);
      from_ = static_cast<uint16_t const*>(is_value ? window.values : window.keys) + elements;
      bytes_ = source.window_tokens * params_.keys.head_dim * static_cast<int>(sizeof(uint16_t));
    }
    if (source.tile < 0) return;
    format::SparseView const& view = source.view(params_);
    tile_ = static_cast<int>(source.tile);
    from_ = view.blocks + int64_t{view.first_row(source.tile)} * format::kLanes;
    bytes_ = view.rows(source.tile) * format::kRowBytes;
    if constexpr (Traits::kHasScales)
      scale_row_ =
          static_cast<int>(params_.values.first_row(source.tile)) + Traits::TileFormat::scale_row(Traits::kHeadDim);
  }

  // Fills a stage. Always commits a group, so that groups count stages.
  CUTE_DEVICE void fetch(int into) {
    int lane = number_ % 32, tile = __shfl_sync(~0u, tile_, lane), bytes = __shfl_sync(~0u, bytes_, lane);
    auto from = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(from_), lane);
    [[maybe_unused]] int scale_row = Traits::kHasScales ? __shfl_sync(~0u, scale_row_, lane) : 0;
    Stage stage = stage_at(into);
    int thread = 32 * worker_.part + ptx::lane_index();
    if (bytes > 0)
      pipeline::copy_block_async<Traits::kWorkerThreads, 2>(stage.block, reinterpret_cast<void const*>(from), bytes,
                                                            thread, ptx::evict_first_policy());
    if (tile >= 0) {
      bool is_value = number_ % 2;
      auto copy_order = [&](uint8_t* to, format::SparseView const& view) {
        pipeline::copy_order_async(to, view.token_order + int64_t{tile} * kOrderBytes, thread);
      };
      if (!is_value) copy_order(stage.token_order, params_.keys);
      if (is_value && params_.zero_masked) copy_order(stage.token_order, params_.values);
      if (!is_value && params_.separate_orders) copy_order(stage.value_order, params_.values);
      if constexpr (Traits::kHasScales) {
        static_assert(format::kRowBytes == 2 * kOrderBytes);
        auto const* row = reinterpret_cast<uint8_t const*>(params_.values.blocks + int64_t{scale_row} * format::kLanes);
        if (!is_value) pipeline::copy_order_async(stage.value_scales, row, thread);
        if (!is_value) pipeline::copy_order_async(stage.value_scales + kOrderBytes, row + kOrderBytes, thread);
      }
    }
    if (++number_ % 32 == 0) look_up();
    cute::cp_async_fence();
  }
};

}  // namespace cute_kernels::attention::sm80
