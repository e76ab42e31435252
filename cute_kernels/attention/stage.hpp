// What a stage in shared memory holds: a tile's block, and the token orders that come with it.
#pragma once

#include "cute_kernels/attention/params.hpp"

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

// Which tile fills a stage. The two stages of a unit follow one another; those of a unit of the window stay empty.
struct StageSource {
  bool is_value;
  int64_t tile = -1;  // in the storage, the same for keys and values; -1: none

  CUTE_DEVICE StageSource(Params const& params, Segment const& segment, int unit, bool is_value) : is_value(is_value) {
    int index = unit - segment.units.begin - segment.window_units;
    if (index < 0 || index * kUnitTokens >= segment.tokens) return;
    tile = view(params).tile_index(segment.sequence, segment.kv_head, index);
  }
  CUTE_DEVICE format::SparseView const& view(Params const& params) const {
    return is_value ? params.values : params.keys;
  }
};

}  // namespace cute_kernels::attention
