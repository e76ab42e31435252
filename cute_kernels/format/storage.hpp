// Compressed storage as kernels see it, that of one SparseKV or a pool of pages: plain pointers and sizes, no
// ownership.
#pragma once

#include <cstdint>

#include "cute_kernels/format/codec/codec.hpp"
#include "cute_kernels/format/codec/scales.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"
#include "cute_kernels/format/tile/two_of_four.hpp"
#include "cute_kernels/format/tile/two_of_four_bitmap.hpp"

namespace cute_kernels::format {

using cute_kernels::DType;

// A pool's tiles are in slots of equal size, wherever there was one free. A page is the slots of `tiles_per_page`
// consecutive tiles of a sequence, for all KV heads: slot = (page * kv_heads + head) * tiles_per_page + tile in page.
// A slot holds a tile's block of keys and, right behind it, that of its values. row_offsets then holds the rows of
// every slot's block, and token_order is (slots, 64).
struct Pages {
  int32_t const* table = nullptr;  // (sequences, pages_per_sequence): page, -1 where there is none; null: no pool
  int pages_per_sequence = 0;
  int tiles_per_page = 0;
  int slot_rows = 0;                     // from one slot to the next
  int count = 0;                         // pages of the pool
  int32_t const* rows_before = nullptr;  // (slots): rows of the slot before this block; null: none
};

struct SparseView {
  uint32_t const* blocks;         // (rows, 32): the tiles' blocks, one after the other
  int32_t const* row_offsets;     // (batch * kv_heads * tiles + 1): first row of each tile's block
  uint8_t const* token_order;     // (batch * kv_heads, tiles, 64): token_position -> token within the tile
  uint8_t const* channel_order;   // (orders, padded_head_dim), see order_index: channel_position -> channel
  uint16_t const* channel_scale;  // (orders, padded_head_dim), by channel_position; null for a codec without scales
  Role role;
  DType dtype;  // of x, of what decompression returns and of what multiplies
  int batch;
  int kv_heads;
  int order_heads;  // orders from one sequence's to the next one's: kv_heads, or 0 where all have the same
  int64_t tokens;
  int head_dim;         // as the user sees it
  int padded_head_dim;  // as the tiles hold it: 64, 128 or 256
  int max_tile_rows;    // that a block in this storage may have, bitmap rows included
  CodecId codec;        // how the values are stored
  TileFormatId tile_format = TileFormatId::kBitmap;
  Pages pages = {};  // of a pool: batch counts its sequences, tokens those that a sequence can have

  CUTE_HOST_DEVICE int64_t tiles_per_head() const { return (tokens + kTileTokens - 1) / kTileTokens; }
  CUTE_HOST_DEVICE int64_t heads() const { return int64_t{batch} * kv_heads; }
  CUTE_HOST_DEVICE int64_t tiles() const { return heads() * tiles_per_head(); }

  // What belongs to the channels of a sequence's head: the index of its channel order, and the order itself.
  CUTE_HOST_DEVICE int64_t order_index(int sequence, int kv_head) const {
    return int64_t{sequence} * order_heads + kv_head;
  }
  CUTE_HOST_DEVICE uint8_t const* channel_order_of(int sequence, int kv_head) const {
    return channel_order + order_index(sequence, kv_head) * padded_head_dim;
  }
  // The scales of its channels, by position; null without scales.
  CUTE_HOST_DEVICE uint16_t const* channel_scale_of(int sequence, int kv_head) const {
    return channel_scale ? channel_scale + order_index(sequence, kv_head) * padded_head_dim : nullptr;
  }

  // Where a sequence's tile is: its index in the storage, and the first row and the rows of its block.
  CUTE_HOST_DEVICE int64_t tile_index(int sequence, int kv_head, int tile) const {
    if (!pages.table) return (int64_t{sequence} * kv_heads + kv_head) * tiles_per_head() + tile;
    int64_t page = *table_entry(sequence, tile);
    return (page * kv_heads + kv_head) * pages.tiles_per_page +
           static_cast<unsigned>(tile) % static_cast<unsigned>(pages.tiles_per_page);
  }
  // Of a pool: where the page of a sequence's tile is looked up.
  CUTE_HOST_DEVICE int32_t const* table_entry(int sequence, int tile) const {
    return pages.table + int64_t{sequence} * pages.pages_per_sequence +
           static_cast<unsigned>(tile) / static_cast<unsigned>(pages.tiles_per_page);  // shorter than with signs
  }
  CUTE_HOST_DEVICE int64_t first_row(int64_t index) const { return first_row(index, look_up_row(index)); }
  // In two steps, so that more can be looked up before the first is waited for.
  CUTE_HOST_DEVICE int32_t look_up_row(int64_t index) const {
    if (!pages.table) return row_offsets[index];
    return pages.rows_before ? pages.rows_before[index] : 0;
  }
  CUTE_HOST_DEVICE int64_t first_row(int64_t index, int32_t found) const {
    return pages.table ? index * pages.slot_rows + found : found;
  }
  CUTE_HOST_DEVICE int rows(int64_t index) const {
    return pages.table ? row_offsets[index] : row_offsets[index + 1] - row_offsets[index];
  }
  // Of a tile format whose blocks all have `block_rows` rows, also one before it in its slot: nothing is looked up.
  CUTE_HOST_DEVICE int64_t first_row_of_equal(int64_t index, int block_rows) const {
    return pages.table ? index * pages.slot_rows + (pages.rows_before ? block_rows : 0) : index * block_rows;
  }

  // Rows of a block before its scales: its bitmap, metadata, or both.
  CUTE_HOST_DEVICE int scale_row() const {
    return tile_format == TileFormatId::kTwoOfFourBitmap ? TwoOfFourBitmapTile::scale_row(padded_head_dim)
                                                         : BitmapTile::scale_row(padded_head_dim);
  }
  // In a block of a codec with scales, in the order of scale_index.
  CUTE_HOST_DEVICE uint16_t const* token_scales(uint32_t const* block) const {
    return reinterpret_cast<uint16_t const*>(block + scale_row() * kLanes);
  }
};

static_assert(BitmapTile::scale_row(kMinHeadDim) == TwoOfFourTile::scale_row(kMinHeadDim));  // see scale_row

// f(tile_format). std::invalid_argument for a number that none has.
template <class F>
decltype(auto) visit_tile_format(TileFormatId id, F&& f) {
  switch (id) {
    case TileFormatId::kBitmap:
      return f(BitmapTile{});
    case TileFormatId::kTwoOfFour:
      return f(TwoOfFourTile{});
    case TileFormatId::kTwoOfFourBitmap:
      return f(TwoOfFourBitmapTile{});
  }
  throw std::invalid_argument("there is no tile format " + std::to_string(static_cast<int>(id)));
}

inline char const* tile_format_name(TileFormatId id) {
  return visit_tile_format(id, [](auto tile_format) { return decltype(tile_format)::kName; });
}

// For kernels of one tile format: std::runtime_error for storage in another. user: who reads it, for the message.
inline void check_tile_format(SparseView const& view, TileFormatId id, char const* user) {
  if (view.tile_format != id)
    throw std::runtime_error(std::string(user) + " has no kernels for the tile format " +
                             tile_format_name(view.tile_format));
}

}  // namespace cute_kernels::format
