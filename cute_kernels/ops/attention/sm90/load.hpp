// What the producers of CC 9.0 load: bulk copies, a tile's block and its token orders each with one. A KV tile has two
// iterations of its worker, keys then values.
#pragma once

#include "cute_kernels/ops/attention/mask.hpp"
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
  static constexpr bool kLimitsLater = false;

  int bytes = 0;                  // of a compressed tile's block, or of tokens of the window; 0: nothing
  int order = -1;                 // 2 * tile in the storage, + 1 of values, if its token order is needed
  uint8_t const* from = nullptr;  // the bytes

  TileLoad() = default;
  CUTE_DEVICE TileLoad(RingParams const& params, typename Traits::Schedule const& schedule, int number) {
    int iteration, worker;
    params.ring.workers(iteration, worker, number);
    bool is_value = iteration % 2;
    schedule::Range split = schedule.split_of_worker(worker);
    int kv_tile = split.begin + iteration / 2;
    if (kv_tile >= split.end) return;
    schedule::WorkTile work_tile = schedule.work_tile_of_worker(worker, kv_tile);
    StageSource<Traits> source(params, work_tile, kv_tile, is_value);
    if (source.window_tokens > 0) {
      Window const& window = params.window;
      int64_t first = window_offset(work_tile, is_value ? window.value_strides : window.key_strides,
                                    (kv_tile - work_tile.tiles.begin) * schedule::kWindowTileTokens);
      auto const* elements = static_cast<uint16_t const*>(is_value ? window.values : window.keys) + first;
      bytes = source.window_tokens * params.keys.head_dim * static_cast<int>(sizeof(*elements));
      from = reinterpret_cast<uint8_t const*>(elements);
    }
    if (source.tile < 0) return;
    format::SparseView const& view = source.view(params);
    if constexpr (Traits::kUniform) __builtin_assume(!view.pages.table);
    int index = static_cast<int>(source.tile), rows, first_row;
    if constexpr (Traits::kBlocksAreEqual) {
      rows = Traits::TileFormat::template tile_rows<typename Traits::Codec>(Traits::kHeadDim);
      first_row = static_cast<int>(view.first_row_of_equal(index, rows));
    } else {  // both are looked up before the first is waited for
      int32_t found = view.look_up_row(index);
      rows = view.rows(index);
      first_row = static_cast<int>(view.first_row(index, found));
    }
    bytes = rows * format::kRowBytes;
    from = reinterpret_cast<uint8_t const*>(view.blocks + int64_t{first_row} * format::kLanes);
    bool masked = kv_tile >= Mask(params, work_tile).first_masked_tile();
    bool of_values = Traits::kZeroesMasked && params.zero_masked;
    if (is_value ? of_values : masked || (Traits::kSeparateOrders && params.separate_orders))
      order = 2 * index + is_value;
  }

  template <class Barrier>
  CUTE_DEVICE void load(RingParams const& params, typename Traits::Schedule const&, uint8_t* to, Barrier& full) const {
    Stage stage(params.stages, to);
    auto copy = [&](uint8_t* destination, uint8_t const* source, int size) {
      ptx::bulk_copy(destination, source, size, &full, params.cache_policy);
    };
    if (order >= 0) {
      int64_t offset = int64_t{order / 2} * kOrderBytes;
      bool is_value = order % 2, value_order = Traits::kSeparateOrders && !is_value && params.separate_orders;
      full.expect_transaction((1 + value_order) * kOrderBytes);
      copy(stage.token_order, (is_value ? params.values : params.keys).token_order + offset, kOrderBytes);
      if (value_order) copy(stage.value_order, params.values.token_order + offset, kOrderBytes);
    }
    full.arrive_and_expect_tx(bytes);
    if (bytes > 0) copy(stage.block, from, bytes);
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
  unsigned warp = (blockDim.x - 1 - threadIdx.x) / 32;
  if (threadIdx.x < 32) return;  // splits wait for the first warp
  unsigned work_tiles = schedule.work_tiles_of_cta();
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
