// Where in the storage tiles of dense rows are written.
#pragma once

#include <cuda_runtime_api.h>

#include "cute_kernels/compress/pool.hpp"

namespace cute_kernels::compress {

inline constexpr int64_t kLeftOut = -2;  // in place of a slot: the row is left out

// A pool's; by default that of a contiguous storage, whose heads are those of the dense rows.
struct Destination {
  format::Pages pages = {};
  int sequences = 0, kv_heads = 0, order_heads = 0;
  PoolRows rows = {};
  int64_t skipped_tiles = 0;  // tiles of every row that were stored before these

  Destination() = default;
  Destination(Pool const& pool, PoolRows const& rows)
      : pages(pool.keys.pages),
        sequences(pool.keys.batch),
        kv_heads(pool.keys.kv_heads),
        order_heads(pool.keys.order_heads),
        rows(rows) {}

  __device__ bool deals(NewOrder order, unsigned head) const {
    return !pages.table || compress::deals(order, rows.first_tiles[head / kv_heads]);
  }

  // As SparseView::order_index; negative for rows that are left out.
  __device__ int64_t order_index(unsigned head) const {
    if (!pages.table) return head;
    int sequence = rows.sequences[head / kv_heads];
    return 0 <= sequence && sequence < sequences ? int64_t{sequence} * order_heads + head % kv_heads : -1;
  }

  // The slot of a pool's tile, or kNoSlot or kLeftOut.
  __device__ int64_t slot(unsigned head, unsigned tile) const {
    int sequence = rows.sequences[head / kv_heads];
    if (sequence < 0) return kLeftOut;
    int64_t of_sequence = rows.first_tiles[head / kv_heads] + skipped_tiles + tile;
    return find_slot(pages, sequences, kv_heads, sequence, head % kv_heads, of_sequence);
  }
};

// As for contiguous storage, into the orders of the sequences that `to` names, where `order` says so; and, unless null,
// the scales of channels, by channel, which go there by position.
void deal(int32_t const* counts, uint16_t const* channel_scale, int heads, format::SparseView const& view,
          Destination const& to, NewOrder order, cudaStream_t stream);

// The scales of the sequences' channels, by channel, of the heads whose channels `order` does not deal anew.
void load_scales(format::SparseView const& view, Destination const& to, NewOrder order, int heads,
                 uint16_t* channel_scale, cudaStream_t stream);

}  // namespace cute_kernels::compress
