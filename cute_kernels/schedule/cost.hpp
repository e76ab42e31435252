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
// The first split of a work tile begins with its window, which takes longer than as many compressed tiles: it has fewer
// of these. Of long splits it has as many: the CTA's other workers are busy meanwhile, and wait for it after a few tiles.
CUTE_HOST_DEVICE constexpr int window_lead(int64_t window_tokens, int tiles_of_split) {
  constexpr int kLead = 2, kShortSplit = 6;  // tiles
  int compressed = tiles_of_split - static_cast<int>(window_tiles_of(window_tokens));
  if (window_tokens == 0 || tiles_of_split > kShortSplit || compressed <= 0) return 0;
  return compressed < kLead ? compressed : kLead;
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
