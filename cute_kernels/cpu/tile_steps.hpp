// The steps of compression for one tile, which contiguous caches and pools of pages share. Masks of a token are
// padded / 32 words. A dense tile is (64, padded) in position order, the codomain of the tile format's element_layout.
#pragma once

#include <cstdint>

#include "cute_kernels/cpu/cpu.hpp"
#include "cute_kernels/format/token_order.hpp"

namespace cute_kernels::cpu {

// Nonzeros in every class of 64 tokens, `stride` bytes from one to the next; zeros for those beyond `tokens`.
void count_classes(uint32_t const* masks, int64_t tokens, uint8_t const* channel_order, int padded, uint8_t* counts,
                   int stride);

// The dense tile of `x`; elements that are not in the masks are zeros.
void gather_tile(DenseView const& x, int64_t head, int64_t first_token, uint32_t const* masks,
                 uint8_t const* token_order, uint8_t const* channel_order, int padded, uint16_t* dense);

// Drops, of every stream longer than `most`, the values of least magnitude, of equal ones the later. How many.
int trim_streams(SparseView const& view, int most, uint16_t* dense);

// The scales of a tile; null without scales.
struct TileScales {
  uint16_t const* tokens;    // (64), in the order of the block's row, see scale_index
  uint16_t const* channels;  // (padded), by position

  float token(int position) const { return format::scale_value(tokens[format::scale_index(position)]); }
  float channel(int position) const { return format::scale_value(channels[position]); }
};

// A dense tile to the `rows` rows of its block in the view's codec, and back.
void write_block(SparseView const& view, uint16_t const* dense, TileScales const& scales, int rows, uint32_t* block);
void read_block(SparseView const& view, uint32_t const* block, uint16_t const* channel_scales, int rows,
                uint16_t* dense);

// The first `tokens` of a dense tile to (tokens, head_dim).
void scatter_tile(uint16_t const* dense, uint8_t const* token_order, uint8_t const* channel_order, int padded,
                  int head_dim, int64_t tokens, uint16_t* out);

}  // namespace cute_kernels::cpu
