// What the producers of CC 9.0 load: bulk copies, a tile's block and its token orders each with one. A KV tile has two
// iterations of its worker, keys then values.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_kernels/ops/attention/stage.hpp"
#include "cute_kernels/pipeline/bulk/fill_ring.hpp"
#include "cute_kernels/pipeline/bulk/params.hpp"

namespace cute_kernels::attention::sm90 {

using pipeline::StageRing;
using RingParams = pipeline::RingParams<Params>;

inline constexpr int kStagesAhead = 16;  // at most, beyond one a worker

// Stages beyond a shorter split's end stay empty, and so do those of the window if its tokens are not staged.
template <class Traits>
struct TileLoad {
  enum class Source { kNothing, kTile, kWindow };

  Source source = Source::kNothing;
  bool is_value = false;
  int rows = 0;                 // of a compressed tile's block; tokens of the window
  int tile = 0, first_row = 0;  // of a compressed tile
  int scale_row = 0;            // of its values' scales, which come with its keys
  int64_t window_elements = 0;  // from the window's start

  TileLoad() = default;
  CUTE_DEVICE TileLoad(RingParams const& params, typename Traits::Schedule const& schedule, int number) {
    int iteration, worker;
    params.ring.workers(iteration, worker, number);
    is_value = iteration % 2;
    schedule::Range split = schedule.split_of_worker(worker);
    int kv_tile = split.begin + iteration / 2;
    if (kv_tile >= split.end) return;
    schedule::WorkTile work_tile = schedule.work_tile_of_worker(worker, kv_tile);
    StageSource<Traits> stage_source(params, work_tile, kv_tile, is_value);
    if (stage_source.window_tokens > 0) {
      Window const& window = params.window;
      source = Source::kWindow;
      rows = stage_source.window_tokens;
      window_elements = window_offset(work_tile, is_value ? window.value_strides : window.key_strides,
                                      (kv_tile - work_tile.tiles.begin) * schedule::kWindowTileTokens);
    }
    if (stage_source.tile < 0) return;
    format::SparseView const& view = stage_source.view(params);
    if constexpr (Traits::kUniform) {
      __builtin_assume(!view.pages.table);
      __builtin_assume(!params.values.pages.table);
    }
    source = Source::kTile;
    tile = static_cast<int>(stage_source.tile);
    format::SparseView const& values = params.values;
    bool loads_scales = Traits::kHasScales && !is_value;
    int values_first_row = 0;
    if constexpr (Traits::kBlocksAreEqual) {
      rows = Traits::TileFormat::template tile_rows<typename Traits::Codec>(Traits::kHeadDim);
      first_row = static_cast<int>(view.first_row_of_equal(tile, rows));
      if (loads_scales) values_first_row = static_cast<int>(values.first_row_of_equal(tile, rows));
    } else {  // all are looked up before the first is waited for
      int32_t values_found = loads_scales ? values.look_up_row(tile) : 0, found = view.look_up_row(tile);
      rows = view.rows(tile);
      first_row = static_cast<int>(view.first_row(tile, found));
      if (loads_scales) values_first_row = static_cast<int>(values.first_row(tile, values_found));
    }
    scale_row = values_first_row + Traits::TileFormat::scale_row(Traits::kHeadDim);
  }

  template <class Barrier>
  CUTE_DEVICE void load(RingParams const& params, typename Traits::Schedule const&, uint8_t* to, Barrier& full) const {
    using cute::TMA::CacheHintSm90;
    if (source == Source::kNothing) return full.arrive();
    bool read_once = params.schedule.row_blocks.divisor == 1;
    auto policy = static_cast<uint64_t>(read_once ? CacheHintSm90::EVICT_FIRST : CacheHintSm90::EVICT_NORMAL);
    Stage stage(params.stages, to);
    if (source == Source::kWindow) {
      auto const* from = static_cast<uint16_t const*>(is_value ? params.window.values : params.window.keys);
      int bytes = rows * params.keys.head_dim * static_cast<int>(sizeof(*from));
      full.arrive_and_expect_tx(bytes);
      return ptx::bulk_copy(stage.block, from + window_elements, bytes, &full, policy);
    }
    bool token_order = !is_value || (Traits::kZeroesMasked && params.zero_masked);
    bool value_order = Traits::kSeparateOrders && !is_value && params.separate_orders;
    int bytes = rows * format::kRowBytes;
    int scale_bytes = Traits::kHasScales && !is_value ? format::kRowBytes : 0;
    full.arrive_and_expect_tx(bytes + scale_bytes + (token_order + value_order) * kOrderBytes);
    format::SparseView const& view = is_value ? params.values : params.keys;
    ptx::bulk_copy(stage.block, view.blocks + int64_t{first_row} * format::kLanes, bytes, &full, policy);
    if (scale_bytes)
      ptx::bulk_copy(stage.value_scales, params.values.blocks + int64_t{scale_row} * format::kLanes, scale_bytes, &full,
                     policy);
    int64_t order = int64_t{tile} * kOrderBytes;
    if (token_order) ptx::bulk_copy(stage.token_order, view.token_order + order, kOrderBytes, &full, policy);
    if (value_order) ptx::bulk_copy(stage.value_order, params.values.token_order + order, kOrderBytes, &full, policy);
  }
};

// Asks for the lengths that splits depend on, a thread a line of them, while the CTA still works out which it needs.
template <class Traits>
CUTE_DEVICE void prefetch_lengths(RingParams const& params) {
  if constexpr (Traits::kUniform) return;
  constexpr int kLengths = 128 / sizeof(int32_t);  // in a line
  int sequences = params.keys.batch, ahead = threadIdx.x * kLengths;
  if (ahead >= sequences + kLengths) return;  // lines need not begin where lengths do
  int sequence = min(ahead, sequences - 1);
  if (params.schedule.lengths) ptx::prefetch(params.schedule.lengths + sequence);
  if (params.schedule.window_lengths) ptx::prefetch(params.schedule.window_lengths + sequence);
}

// Asks for what the CTA's tiles in pages are looked up in, a lane a tile, a warp 32 tiles of one of its work tiles: all
// of them, since every worker begins elsewhere. Where tiles are does not depend on lengths, and which the CTA has is
// about as expected. So that need not wait for lengths.
template <class Traits>
CUTE_DEVICE void prefetch_tile_rows(RingParams const& params, typename Traits::Schedule const& schedule) {
  format::SparseView const& keys = params.keys;
  if (Traits::kUniform || !keys.pages.table || !params.schedule.by_work_tile) return;
  unsigned warp = (blockDim.x - 1 - threadIdx.x) / 32, work_tiles = schedule.work_tiles_of_cta();  // the first is busy
  auto expected = schedule.expected_tiles(warp % work_tiles);
  int tile = expected.first + static_cast<int>(warp / work_tiles * 32 + threadIdx.x % 32);
  if (tile >= expected.end || tile >= keys.pages.pages_per_sequence * keys.pages.tiles_per_page) return;
  if constexpr (Traits::kBlocksAreEqual) return ptx::prefetch(keys.table_entry(expected.sequence, tile));
  int64_t slot = keys.tile_index(expected.sequence, expected.kv_head, tile);
  if (slot < 0) return;
  ptx::prefetch(keys.row_offsets + slot);
  ptx::prefetch(params.values.row_offsets + slot);  // before values are the rows of keys
}

// `producer`: of kMaxProducers.
template <class Traits>
CUTE_DEVICE void load_tiles(RingParams const& params, typename Traits::Schedule const& schedule, StageRing const& ring,
                            int producer) {
  if (!Traits::kBlocksAreEqual && producer < 2)
    params.prefetch_row_offsets((producer == 0 ? params.keys : params.values).row_offsets);
  pipeline::fill_ring<TileLoad<Traits>>(ring, producer, 2 * schedule.longest_split(), params, schedule);
}

}  // namespace cute_kernels::attention::sm90
