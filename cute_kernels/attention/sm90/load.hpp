// What the producers of CC 9.0 bring: bulk copies (TMA), a tile's block and its token orders each with one. A unit has
// two turns of its worker, keys then values.
#pragma once

#include "cute_kernels/attention/sm90/params.hpp"
#include "cute_kernels/attention/stage.hpp"
#include "cute_kernels/attention/work.hpp"
#include "cute_kernels/matmul/sm90/fill_ring.hpp"

namespace cute_kernels::attention::sm90 {

using matmul::sm90::StageRing;

inline constexpr int kStagesAhead = 16;  // at most, beyond one a worker; 8 take as long (profiling/NOTES.md)

// Stages beyond a shorter piece's end stay empty, and so do those of the window if its tokens are not staged.
template <class Traits>
struct Slot {
  bool is_value = false;
  int rows = 0;                 // of a tile's block; below 0: -tokens of the window; 0: nothing
  int tile = 0, first_row = 0;  // of the window: the low and the high half of their offset in elements

  Slot() = default;
  CUTE_DEVICE Slot(RingParams const& params, WorkLine<Traits> const& line, int number) {
    int turn, worker;
    params.ring.workers(turn, worker, number);
    is_value = turn % 2;
    UnitRange piece = line.piece_of_worker(worker);
    int unit = piece.begin + turn / 2;
    if (unit >= piece.end) return;
    Segment segment = line.segment_with(unit);
    UnitMap map = line.unit_map(segment, blockIdx.x * params.workers + worker);
    StageSource<Traits> source(params, segment, map, unit, is_value);
    if (source.window_tokens > 0) {
      Window const& window = params.window;
      int64_t offset = window_offset(segment, is_value ? window.value_strides : window.key_strides,
                                     (unit - map.first_window) * kWindowUnitTokens);
      rows = -source.window_tokens;
      tile = static_cast<int>(offset), first_row = static_cast<int>(offset >> 32);
    }
    if (source.tile < 0) return;
    format::SparseView const& view = source.view(params);
    if constexpr (Traits::kPlain) __builtin_assume(!view.pages.table);
    tile = static_cast<int>(source.tile);
    first_row = static_cast<int>(view.first_row(tile));
    rows = view.rows(tile);
  }

  template <class Barrier>
  CUTE_DEVICE void bring(RingParams const& params, WorkLine<Traits> const&, uint8_t* to, Barrier& full) const {
    if (rows == 0) return full.arrive();
    auto policy = static_cast<uint64_t>(params.row_blocks.divisor == 1 ? TMA::CacheHintSm90::EVICT_FIRST
                                                                       : TMA::CacheHintSm90::EVICT_NORMAL);
    Stage stage(params.stages, to);
    if (rows < 0) {
      auto const* from = static_cast<uint16_t const*>(is_value ? params.window.values : params.window.keys);
      int bytes = -rows * params.keys.head_dim * static_cast<int>(sizeof(*from));
      full.arrive_and_expect_tx(bytes);
      from += int64_t{first_row} << 32 | static_cast<uint32_t>(tile);
      return ptx::bulk_copy(stage.block, from, bytes, &full, policy);
    }
    bool own_order = !is_value || (!Traits::kPlain && params.erases);
    bool value_order = Traits::kOwnOrders && !is_value && params.own_orders;
    int bytes = rows * format::kRowBytes;
    full.arrive_and_expect_tx(bytes + (own_order + value_order) * kOrderBytes);
    format::SparseView const& view = is_value ? params.values : params.keys;
    ptx::bulk_copy(stage.block, view.blocks + int64_t{first_row} * format::kLanes, bytes, &full, policy);
    int64_t order = int64_t{tile} * kOrderBytes;
    if (own_order) ptx::bulk_copy(stage.token_order, view.token_order + order, kOrderBytes, &full, policy);
    if (value_order) ptx::bulk_copy(stage.value_order, params.values.token_order + order, kOrderBytes, &full, policy);
  }
};

// `producer`: of kMaxProducers.
template <class Traits>
CUTE_DEVICE void load_tiles(RingParams const& params, WorkLine<Traits> const& line, StageRing const& ring,
                            int producer) {
  if (producer < 2) params.first_tiles.prefetch((producer == 0 ? params.keys : params.values).row_offsets);
  matmul::sm90::fill_ring<Slot<Traits>>(ring, producer, 2 * line.longest(), params, line);
}

}  // namespace cute_kernels::attention::sm90
