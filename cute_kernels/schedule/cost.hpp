// What KV tiles and work tiles cost, in units of one compressed tile.
#pragma once

#include <cute/config.hpp>

#include "cute_kernels/format/tile/bitmap.hpp"

namespace cute_kernels::schedule {

inline constexpr int kWindowTileTokens = 32;  // dense ones

CUTE_HOST_DEVICE constexpr int64_t tiles_of(int64_t tokens) {
  return (tokens + format::kTileTokens - 1) / format::kTileTokens;
}
CUTE_HOST_DEVICE constexpr int64_t window_tiles_of(int64_t tokens) {
  return (tokens + kWindowTileTokens - 1) / kWindowTileTokens;
}
// KV tiles of a work tile: one that has no token has one KV tile all the same, so that its result is written.
CUTE_HOST_DEVICE constexpr int64_t kv_tiles_of(int64_t tokens, int64_t window_tokens) {
  int64_t tiles = tiles_of(tokens) + window_tiles_of(window_tokens);
  return tiles > 0 ? tiles : 1;
}

// Attention: a work tile's own cost, for its queries and its result, beside its KV tiles'. More where lengths are on
// the device: they end within a tile, which takes longer.
CUTE_HOST_DEVICE constexpr int attention_work_tile_cost(bool variable_length) { return variable_length ? 3 : 2; }

}  // namespace cute_kernels::schedule
