// Compression on the GPU, step by step: select what is kept, balance the tiles, pack them; and back.
// The same steps with the same results, bit for bit, as the CPU backend (cpu/). Nothing here synchronises or allocates.
#pragma once

#include <cuda_runtime_api.h>

#include "cute_kernels/format/head_dim.hpp"
#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::compress {

using TileFormat = format::BitmapTile;  // that these kernels write and read

// f(codec) with what kernels that move values are instantiated for: those of 16 bits are moved bit for bit, whatever
// they mean.
template <class F>
void visit_packed_codec(format::CodecId id, F&& f) {
  format::visit_codec(id, [&](auto codec) {
    if constexpr (decltype(codec)::kIsNarrow)
      f(codec);
    else
      f(format::Fp16Codec{});
  });
}

// A dense K or V: (batch, kv_heads, tokens, head_dim), channel stride 1, other strides in elements.
struct DenseView {
  void const* data;
  int64_t stride_batch, stride_head, stride_token;
  int batch, kv_heads;
  int64_t tokens;
  int head_dim;
  DType dtype;

  // The first element of a token, which is 16 bits wide.
  CUTE_HOST_DEVICE uint16_t const* row(unsigned head, int64_t token) const {
    return static_cast<uint16_t const*>(data) + int64_t{head / kv_heads} * stride_batch +
           int64_t{head % kv_heads} * stride_head + token * stride_token;
  }
  // Whether every token starts on 16 bytes, at a distance within its tile that 32 bits hold.
  bool has_vectors() const {
    constexpr int kValues = 8, kLargestStride = 1 << 24;
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_batch % kValues == 0 && stride_head % kValues == 0 &&
           stride_token % kValues == 0 && stride_token >= 0 && stride_token <= kLargestStride;
  }
};

// Scratch of one word for every lane of a tile's bitmap: mask_bytes for each tile. `select` writes it channel by
// channel, words of 32 tokens of a tile; `balance` turns it into rows of channels, tokens and channels in position
// order, for `pack`.
constexpr int64_t mask_bytes(int padded_head_dim) { return int64_t{format::kTileTokens} * padded_head_dim / 8; }

// The scales of channels of a narrow codec, (batch * kv_heads, padded) by channel: see format/codec/scales.hpp. Sets
// `counts`, of as many channels, and `refused` to 0 unless they are null.
void channel_scales(DenseView const& x, uint16_t* channel_scale, int32_t* counts, int64_t* refused,
                    cudaStream_t stream);

// What `select` writes besides for a narrow codec; null pointers: nothing.
struct TokenScaling {
  format::CodecId codec = format::CodecId::kFp16;
  uint16_t* channel_scale = nullptr;  // by channel
  uint16_t* token_scale = nullptr;    // (batch * kv_heads, tiles * 64), by token
  int64_t* refused = nullptr;         // counts what is kept and the codec cannot store
  bool chooses_channels = false;      // first writes channel_scale and sets `refused` to 0, by `channel_scales`
};

// Before a selection: makes zeros of its counts, unless they are null, and chooses the scales of channels where `scaling`
// says so.
void prepare_selection(DenseView const& x, TokenScaling const& scaling, int32_t* counts, cudaStream_t stream);

// masks: what is kept and nonzero, with counts (batch * kv_heads, padded), the nonzeros of every channel; or both null.
// pruned: contiguous copy with zeros for what is not kept, or null. keep = 0 keeps every nonzero.
void select(DenseView const& x, int keep, uint32_t* masks, int32_t* counts, void* pruned, TokenScaling const& scaling,
            cudaStream_t stream);

// The channel order (heads, padded): densest channels first, dealt back and forth, to the classes, or, where grouped is not 0,
// so many channels to groups of four neighbours. from_scale, to_scale: the scales of channels, by channel and by position,
// or both null.
void deal(int32_t const* counts, int heads, int padded_head_dim, int grouped, uint8_t* channel_order,
          uint16_t const* from_scale, uint16_t* to_scale, cudaStream_t stream);

// What `balance` reads of one cache, and the longest stream of each of its tiles that it writes.
struct BalanceOperand {
  uint32_t* masks;
  uint8_t const* channel_order;
  int32_t* longest;
};
// `second` has null masks, or is the V of a pair that shares one token order.
void balance(BalanceOperand const& first, BalanceOperand const& second, int heads, int64_t tokens, int padded_head_dim,
             uint8_t* token_order, cudaStream_t stream);

// Of blocks in `codec`: row_offsets (tiles + 1), and totals: rows in all, rows of the longest tile, nonzeros. At least one tile.
void offsets(int32_t const* longest, int64_t tiles, int32_t const* counts, int heads, int padded_head_dim,
             format::CodecId codec, format::TileFormatId tile_format, int32_t* row_offsets, int64_t* totals,
             cudaStream_t stream);

// Writes the blocks, unless they would take more rows than `capacity`; keep and token_scale as for `select`, totals from
// `offsets`.
void pack(DenseView const& x, uint32_t const* masks, uint16_t const* token_scale, int keep, int64_t const* totals,
          int64_t capacity, format::SparseView const& view, cudaStream_t stream);

// Writes the blocks of the tile format of exactly two of four: of every group the two largest. refused: counts what the codec
// cannot store, where it has scales. lost: counts nonzeros that are left out; null: nobody asks.
void pack_two_of_four(DenseView const& x, format::SparseView const& view, int64_t* refused, int64_t* lost,
                      cudaStream_t stream);

// Compression into the tile format of at most two of four, of narrow codecs: what is kept of a cache, the order of tokens of
// one cache or of a pair, and, behind `offsets`, the blocks.
struct SlotScratch {
  int mask_words, count_bytes;  // of a tile
};
SlotScratch slot_scratch(format::Role role, int padded_head_dim);

struct SlotSelection {
  uint8_t const* channel_order;  // (heads, padded)
  int keep;                      // of a token's candidates; 0: all
  uint32_t* masks;               // (heads * tiles, mask_words)
  uint8_t* counts;               // (heads * tiles, count_bytes), as in format::SlotCounts
  // Are added to: values stored, those that the codec cannot store, with keep 0 nonzeros beyond two of four; and, unless
  // null, what magnitude alone would keep and is not kept.
  int64_t* totals;
  int64_t* constrained;
};
void select_slots(DenseView const& x, format::Role role, format::CodecId codec, SlotSelection const& selection,
                  cudaStream_t stream);

// As `select`, by rule "2of4" (keep 0) or "magnitude-2of4": what the bitmap format is to store.
void select_two_of_four(DenseView const& x, format::Role role, uint8_t const* channel_order, int keep, uint32_t* masks,
                        int32_t* counts, TokenScaling const& scaling, cudaStream_t stream);

struct SlotOrder {
  uint8_t const* counts;  // of `select_slots`; null: there is no such cache
  int32_t* longest;       // stream of each tile
  int streams = 0;        // is filled in
};
void order_slots(SlotOrder keys, format::CodecId key_codec, SlotOrder values, format::CodecId value_codec,
                 int64_t tiles, uint8_t* token_order, cudaStream_t stream);

// tile_rows: null, or tiles lie anywhere in the blocks: row_offsets has their first rows, this (tiles) how many each may
// have. dropped: tiles that were trimmed to them, and values that they lost, are added. totals may be null.
void pack_slots(DenseView const& x, uint32_t const* masks, int64_t const* totals, int64_t capacity,
                format::SparseView const& view, int32_t const* tile_rows, int64_t* dropped, cudaStream_t stream);

void decompress(format::SparseView const& view, void* out, cudaStream_t stream);
void unpack_slots(format::SparseView const& view, void* out, cudaStream_t stream);        // the same, of that format
void unpack_two_of_four(format::SparseView const& view, void* out, cudaStream_t stream);  // decompress, of that format

}  // namespace cute_kernels::compress
