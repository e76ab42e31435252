// What a stage in shared memory holds: a tile's block, and the token orders that come with it.
#pragma once

#include "cute_kernels/attention/work.hpp"

namespace cute_kernels::attention {

inline constexpr int kOrderBytes = format::kTileTokens;
inline constexpr int kStageOrders = 2;

struct Stage {
  uint8_t* block;
  uint8_t* token_order;  // of keys; of values where Params::erases
  uint8_t* value_order;  // beside the keys' where Params::own_orders

  CUTE_DEVICE Stage(matmul::Stages const& stages, uint8_t* data)
      : block(data),
        token_order(data + stages.stage_bytes - kStageOrders * kOrderBytes),
        value_order(token_order + kOrderBytes) {}
};

// Elements from the start of keys or values of the windows to a token of the segment's.
CUTE_DEVICE int64_t window_offset(Segment const& segment, int64_t const (&strides)[3], int token) {
  return segment.sequence * strides[0] + segment.kv_head * strides[1] + token * strides[2];
}

// What fills a stage: a tile, tokens of the window if they are staged, or nothing. The two stages of a unit follow one
// another, keys then values.
template <class Traits>
struct StageSource {
  bool is_value;
  int64_t tile = -1;      // in the storage, the same for keys and values; -1: none
  int window_tokens = 0;  // 0: none

  CUTE_DEVICE StageSource(Params const& params, Segment const& segment, UnitMap const& map, int unit, bool is_value)
      : is_value(is_value) {
    int index = unit - map.first_tile;
    if (unit < map.window_end) {
      if (params.window_staged)
        window_tokens = min(kWindowUnitTokens, segment.window_tokens - (unit - map.first_window) * kWindowUnitTokens);
    } else if (index * kUnitTokens < segment.tokens) {
      if constexpr (Traits::kPlain) __builtin_assume(!view(params).pages.table);
      tile = view(params).tile_index(segment.sequence, segment.kv_head, index);
    }
  }
  CUTE_DEVICE format::SparseView const& view(Params const& params) const {
    return is_value ? params.values : params.keys;
  }
};

}  // namespace cute_kernels::attention
