// What a stage in shared memory holds: a tile's block, and the token orders and scales that come with it.
#pragma once

#include "cute_kernels/ops/attention/params.hpp"
#include "cute_kernels/ops/attention/traits.hpp"

namespace cute_kernels::attention {

struct Stage {
  uint8_t* block;
  uint8_t* token_order;   // of keys where it is needed; of values where Params::zero_masked
  uint8_t* value_order;   // beside the keys' where Params::separate_orders
  uint8_t* value_scales;  // beside the keys, of a codec with scales: a row of them (sm80)

  CUTE_DEVICE Stage(pipeline::Stages const& stages, uint8_t* data)
      : block(data),
        token_order(data + stages.stage_bytes - kStageOrders * kOrderBytes),
        value_order(token_order + kOrderBytes),
        value_scales(token_order - format::kRowBytes) {}
};

// Elements from the start of keys or values of the windows to a token of the work tile's.
CUTE_DEVICE int64_t window_offset(schedule::WorkTile const& work_tile, int64_t const (&strides)[3], int token) {
  return work_tile.sequence * strides[0] + work_tile.kv_head * strides[1] + token * strides[2];
}

CUTE_DEVICE uint8_t const* channel_order(format::SparseView const& view, schedule::WorkTile const& work_tile) {
  return view.channel_order_of(work_tile.sequence, work_tile.kv_head);
}

CUTE_DEVICE uint16_t const* channel_scale(format::SparseView const& view, schedule::WorkTile const& work_tile) {
  return view.channel_scale_of(work_tile.sequence, work_tile.kv_head);
}

// What fills a stage: a compressed tile, a window tile if the window is staged, or nothing. The two stages of a KV tile
// follow one another, keys then values.
template <class Traits>
struct StageSource {
  bool is_value;
  int64_t tile = -1;      // in the storage, the same for keys and values; -1: none
  int window_tokens = 0;  // 0: none

  CUTE_DEVICE StageSource(Params const& params, schedule::WorkTile const& work_tile, int kv_tile, bool is_value)
      : is_value(is_value) {
    int index = kv_tile - work_tile.window_end();
    if (index < 0) {
      int before = (kv_tile - work_tile.tiles.begin) * schedule::kWindowTileTokens;
      if (params.window_staged) window_tokens = min(schedule::kWindowTileTokens, work_tile.window_tokens - before);
    } else if (index * format::kTileTokens < work_tile.tokens) {
      // In pages of one table: looked up by constants, not by parameters of one view or the other.
      format::SparseView const& of_either = Traits::kUniform ? view(params) : params.keys;
      if constexpr (Traits::kUniform) __builtin_assume(!of_either.pages.table);
      tile = of_either.tile_index(work_tile.sequence, work_tile.kv_head, index);
    }
  }
  CUTE_DEVICE format::SparseView const& view(Params const& params) const {
    return is_value ? params.values : params.keys;
  }
};

}  // namespace cute_kernels::attention
