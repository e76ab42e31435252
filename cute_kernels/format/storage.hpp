// The storage of one SparseKV as kernels see it: plain pointers and sizes, no ownership.
#pragma once

#include <cstdint>

#include "cute_kernels/format/codec.hpp"

namespace cute_kernels::format {

enum class DType : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

struct SparseView {
  const uint32_t* blocks;        // (rows, 32): the tiles' blocks, one after the other
  const int32_t* row_offsets;    // (batch * kv_heads * tiles + 1): first row of each tile's block
  const uint8_t* token_order;    // (batch * kv_heads, tiles, 64): token_position -> token within the tile
  const uint8_t* channel_order;  // (batch * kv_heads, padded_head_dim): channel_position -> channel
  Role role;
  DType dtype;
  int batch;
  int kv_heads;
  int64_t tokens;
  int head_dim;         // as the user sees it
  int padded_head_dim;  // as the tiles hold it: 64, 128 or 256
  int max_tile_rows;    // of any block in this storage, bitmap rows included

  CUTE_HOST_DEVICE int64_t tiles_per_head() const { return (tokens + kTileTokens - 1) / kTileTokens; }
  CUTE_HOST_DEVICE int64_t heads() const { return int64_t{batch} * kv_heads; }
  CUTE_HOST_DEVICE int64_t tiles() const { return heads() * tiles_per_head(); }
};

}  // namespace cute_kernels::format
