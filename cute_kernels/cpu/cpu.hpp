// The CPU backend: what the bindings call. The same steps as the GPU backends on the same format; compression agrees
// with theirs bit for bit. Pointers and sizes were checked by the caller; storage has passed SparseKV.validate().
#pragma once

#include <cstdint>

#include "cute_kernels/compress/pool.hpp"
#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::cpu {

using format::Role;
using format::SparseView;

// A dense K or V: (batch, kv_heads, tokens, head_dim), channel stride 1, other strides in elements.
struct DenseView {
  uint16_t const* data;
  int64_t stride_batch, stride_head, stride_token;
  int batch, kv_heads;
  int64_t tokens;
  int head_dim;
  DType dtype;

  uint16_t const* row(int64_t head, int64_t token) const {  // head: batch index * kv_heads + KV head
    return data + head / kv_heads * stride_batch + head % kv_heads * stride_head + token * stride_token;
  }
};

// The dense operand of a product, q or p: (batch, heads, tokens, last), last stride 1, other strides in elements.
struct DenseOperand {
  void const* data;
  int64_t stride_batch, stride_head, stride_token;
  int heads;
  int64_t tokens;
  DType dtype;
};

// masks (batch * kv_heads * tokens, padded / 32): kept and nonzero, or null. counts (batch * kv_heads, padded):
// nonzeros of a channel, or null. pruned: contiguous copy with zeros for what is not kept, or null. keep = 0 keeps
// every nonzero.
void select(DenseView const& x, int keep, uint32_t* masks, int32_t* counts, uint16_t* pruned, int threads);

// masks as `select` writes them, of the two largest of every four neighbours: tokens of values, and channels of keys in
// the order of channel_order (batch * kv_heads, padded), null for values. Returns how many nonzeros that leaves out. keep:
// of these only so many of a token are left, the largest, ties to the lower channel; 0: all.
int64_t select_two_of_four(DenseView const& x, Role role, uint8_t const* channel_order, int keep, uint32_t* masks,
                           int threads);

// What `balance` reads of one cache, and the longest stream of each of its tiles that it writes.
struct BalanceOperand {
  uint32_t const* masks;
  uint8_t const* channel_order;
  int32_t* longest;
};
// `second` has null masks, or is the V of a pair that shares one token order.
void balance(BalanceOperand const& first, BalanceOperand const& second, int64_t heads, int64_t tokens,
             int padded_head_dim, uint8_t* token_order, int threads);

// As `balance`, of the tile format two_of_four_bitmap: the order of a tile's tokens, see format/group_order.hpp. masks: of
// what has the pattern, null for a cache that there is not.
struct SlotOperand {
  uint32_t const* masks;
  uint8_t const* channel_order;
  format::CodecId codec;
  int32_t* longest;    // (heads * tiles)
  int64_t stored = 0;  // written: values
};
void order_slots(SlotOperand& keys, SlotOperand& values, int64_t heads, int64_t tokens, int padded_head_dim,
                 uint8_t* token_order, int threads);

// The scales of a narrow codec, see format/codec/scales.hpp. `channel_scales` (batch * kv_heads, padded), by channel.
// `token_scales` (batch * kv_heads, tiles * 64), by token, from what is kept; returns how many of those the codec cannot
// store: infinities, and NaN unless it has one.
void channel_scales(DenseView const& x, uint16_t* channel_scale, int threads);
int64_t token_scales(DenseView const& x, uint32_t const* masks, format::CodecId codec, uint16_t const* channel_scale,
                     uint16_t* token_scale, int threads);

// The same for one tile of 64 tokens that exist; per_channel: reciprocals of the channels' scales, by channel. masks: of
// the tile, token_scale (64).
int tile_token_scales(DenseView const& x, int64_t head, int64_t first_token, uint32_t const* masks,
                      format::CodecId codec, float const* per_channel, uint16_t* token_scale);

// Writes every word of every block of `view`, in its codec. token_scale: as `token_scales` writes it, or null.
void pack(DenseView const& x, uint32_t const* masks, uint16_t const* token_scale, SparseView const& view, int threads);

// The same in the tile format two_of_four_bitmap where tiles lie anywhere in the blocks: row_offsets has their first rows,
// tile_rows (tiles) how many each may have. dropped: tiles that were trimmed, and values that they lost, are added.
void pack_slots(DenseView const& x, uint32_t const* masks, uint16_t const* token_scale, SparseView const& view,
                int32_t const* tile_rows, int64_t* dropped, int threads);

// out: contiguous (batch, kv_heads, tokens, head_dim) of the view's dtype.
void decompress(SparseView const& view, uint16_t* out, int threads);

// Selects, orders and packs k and v, whole tiles of tokens, straight into the pool's slots. Rows whose first tile is 0
// choose the scales of their sequence's channels by its tokens.
void store(compress::Pool const& pool, DenseView const& k, DenseView const& v, compress::PoolRows const& rows,
           compress::NewOrder order, int threads);

// keys, values: contiguous (kv_heads, tokens of the run, head_dim); zeros where there is no page.
void load(compress::Pool const& pool, compress::TileRun const& run, uint16_t* keys, uint16_t* values, int threads);

// out: contiguous (batch, q.heads, q.tokens, tokens) of out_dtype.
void sparse_qk(SparseView const& view, DenseOperand const& q, float scale, void* out, DType out_dtype, int threads);

// out: contiguous (batch, p.heads, p.tokens, head_dim) of the view's dtype; the same bits for any number of threads.
void sparse_av(SparseView const& view, DenseOperand const& p, uint16_t* out, int threads);

}  // namespace cute_kernels::cpu
