// A pool of pages as compression fills it, on every backend: plain pointers and sizes, no ownership.
#pragma once

#include <cstdint>

#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::compress {

// Keys and values of one page table. A tile of them shares its token order and its slot, keys before values.
struct Pool {
  format::SparseView keys, values;
  int key_keep, value_keep;  // nonzeros that a token keeps at most; 0: all
  int64_t* dropped;          // (2, 2), keys and values: tiles that were trimmed, nonzeros that they lost
  int32_t* error;            // set to 1 where a tile has no page or a window no capacity left
};

inline constexpr int64_t kNoSlot = -1;

// The slot of a sequence's tile in a pool; kNoSlot where there is no page.
CUTE_HOST_DEVICE constexpr int64_t find_slot(format::Pages const& pages, int sequences, int kv_heads, int sequence,
                                             int kv_head, int64_t tile) {
  if (sequence < 0 || sequence >= sequences || tile < 0) return kNoSlot;
  if (tile >= int64_t{pages.pages_per_sequence} * pages.tiles_per_page) return kNoSlot;
  int64_t page = pages.table[int64_t{sequence} * pages.pages_per_sequence + tile / pages.tiles_per_page];
  return page < 0 ? kNoSlot : (page * kv_heads + kv_head) * pages.tiles_per_page + tile % pages.tiles_per_page;
}
CUTE_HOST_DEVICE constexpr int64_t find_slot(format::SparseView const& view, int sequence, int kv_head, int64_t tile) {
  return find_slot(view.pages, view.batch, view.kv_heads, sequence, kv_head, tile);
}

// Value rows that the tiles of a slot may have. Values have what the keys leave of the slot. A pool stores 16-bit
// values, one a row: a stream's length is its number of rows.
struct SlotLimits {
  int both, most_keys, most_values;

  SlotLimits() = default;
  explicit SlotLimits(Pool const& pool) {
    int bitmap = format::BitmapTile::bitmap_rows(pool.keys.padded_head_dim);
    both = pool.keys.pages.slot_rows - 2 * bitmap;
    most_keys = pool.keys.max_tile_rows - bitmap;
    most_values = pool.values.max_tile_rows - bitmap;
  }
  // longest_key: stream of the tile of keys, before it is trimmed.
  CUTE_HOST_DEVICE constexpr int keys(int longest_key) const {
    return longest_key < most_keys ? longest_key : most_keys;
  }
  CUTE_HOST_DEVICE constexpr int values(int longest_key) const {
    int left = both - keys(longest_key);
    return left < most_values ? left : most_values;
  }
};

// Row i of dense tensors becomes tiles of sequence sequences[i], from tile first_tiles[i] on; of none if it is
// negative.
struct PoolRows {
  int32_t const* sequences;
  int32_t const* first_tiles;
};

// Which rows deal their sequence's channels anew, from the counts of their own tokens; kNever where all sequences have
// the same orders.
enum class NewOrder : int { kNever = 0, kAlways = 1, kAtFirstTile = 2 };

CUTE_HOST_DEVICE constexpr bool deals(NewOrder order, int first_tile) {
  return order == NewOrder::kAlways || (order == NewOrder::kAtFirstTile && first_tile == 0);
}

// A run of one sequence's tiles.
struct TileRun {
  int sequence, first_tile, tiles;
};

}  // namespace cute_kernels::compress
