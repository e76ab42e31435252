// A pool of pages as compression fills it, on every backend: plain pointers and sizes, no ownership.
#pragma once

#include <cstdint>
#include <cute/numeric/math.hpp>

#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::compress {

// Keys and values of one page table. A tile of them shares its token order and its slot, keys before values.
struct Pool {
  format::SparseView keys, values;
  int key_keep, value_keep;  // nonzeros that a token keeps at most; 0: all
  int64_t* dropped;          // (2, 2), keys and values: tiles that were trimmed, nonzeros that they lost
  int64_t* refused;          // (2): nonzeros that the codec cannot store
  int32_t* error;            // set to 1 where a tile has no page or a window no capacity left
};

inline constexpr int64_t kNoSlot = -1;

// The slot of a sequence's tile in a pool; kNoSlot where there is no page, or none that the pool has.
CUTE_HOST_DEVICE constexpr int64_t find_slot(format::Pages const& pages, int sequences, int kv_heads, int sequence,
                                             int kv_head, int64_t tile) {
  if (sequence < 0 || sequence >= sequences || tile < 0) return kNoSlot;
  if (tile >= int64_t{pages.pages_per_sequence} * pages.tiles_per_page) return kNoSlot;
  int64_t page = pages.table[int64_t{sequence} * pages.pages_per_sequence + tile / pages.tiles_per_page];
  if (page < 0 || page >= pages.count) return kNoSlot;
  return (page * kv_heads + kv_head) * pages.tiles_per_page + tile % pages.tiles_per_page;
}
CUTE_HOST_DEVICE constexpr int64_t find_slot(format::SparseView const& view, int sequence, int kv_head, int64_t tile) {
  return find_slot(view.pages, view.batch, view.kv_heads, sequence, kv_head, tile);
}

// Rows of a tile of one codec: those before its values, and words of a stream, one in every `step` rows.
struct TileRows {
  int before_values, word_values_log2, step;

  TileRows() = default;
  explicit TileRows(format::SparseView const& view) : TileRows(view.codec, view.tile_format, view.padded_head_dim) {}
  TileRows(format::CodecId codec, format::TileFormatId tile_format, int padded_head_dim) {
    format::visit_codec(codec, [&](auto of) {
      using Codec = decltype(of);
      using Slots = format::TwoOfFourBitmapTile;
      bool has_slots = tile_format == Slots::kId;
      before_values = has_slots ? Slots::first_value_row<Codec>(padded_head_dim)
                                : format::BitmapTile::first_value_row<Codec>(padded_head_dim);
      word_values_log2 = cute::log_2(static_cast<unsigned>(Codec::kWordValues));
      step = has_slots ? Slots::Packed<Codec>::kWordRows : Codec::kWordRows;
    });
  }
  // Of a tile whose longest stream has `longest` values; and how long a stream may be in so many rows.
  CUTE_HOST_DEVICE constexpr int of(int longest) const {
    return before_values + ((longest + (1 << word_values_log2) - 1) >> word_values_log2) * step;
  }
  CUTE_HOST_DEVICE constexpr int longest(int rows) const { return (rows - before_values) / step << word_values_log2; }
};

// How long the streams of a slot's tiles may be. Values have the rows that the keys leave of the slot.
struct SlotLimits {
  TileRows key_rows, value_rows;
  int both, most_keys, most_values;  // rows of the slot and of a tile of values; values of a stream of keys

  SlotLimits() = default;
  explicit SlotLimits(Pool const& pool)
      : key_rows(pool.keys),
        value_rows(pool.values),
        both(pool.keys.pages.slot_rows),
        most_keys(key_rows.longest(pool.keys.max_tile_rows)),
        most_values(pool.values.max_tile_rows) {}
  // longest_key: stream of the tile of keys, before it is trimmed.
  CUTE_HOST_DEVICE constexpr int keys(int longest_key) const {
    return longest_key < most_keys ? longest_key : most_keys;
  }
  CUTE_HOST_DEVICE constexpr int values(int longest_key) const {
    int left = both - key_rows.of(keys(longest_key));
    return value_rows.longest(left < most_values ? left : most_values);
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
