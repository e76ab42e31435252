// The steps of compression for one tile, which contiguous caches and pools of pages share. Masks of a token are
// padded / 32 words, positions the element_table of the tile's role.
#pragma once

#include <cstdint>

#include "cute_kernels/cpu/cpu.hpp"
#include "cute_kernels/format/token_order.hpp"

namespace cute_kernels::cpu {

// Nonzeros in every class of 64 tokens, `stride` bytes from one to the next; zeros for those beyond `tokens`.
void count_classes(const uint32_t* masks, int64_t tokens, const uint8_t* channel_order, int padded, uint8_t* counts,
                   int stride);

// A tile of `x` in position order, (64, padded), with zeros for what its tokens' masks leave out.
void gather_tile(const DenseView& x, int64_t head, int64_t first_token, const uint32_t* masks,
                 const uint8_t* token_order, const uint8_t* channel_order, int padded, uint16_t* dense);

// Drops, of every stream longer than `most`, the values of least magnitude, of equal ones the later. How many.
int trim_streams(uint16_t* dense, const uint16_t* positions, int padded, int most, DType dtype);

// `rows` of the block, bitmap rows included.
void write_block(const uint16_t* dense, const uint16_t* positions, int padded, int rows, uint32_t* block);
void read_block(const uint32_t* block, const uint16_t* positions, int padded, int rows, uint16_t* dense);

// The first `tokens` of a tile in position order to (tokens, head_dim).
void scatter_tile(const uint16_t* dense, const uint8_t* token_order, const uint8_t* channel_order, int padded,
                  int head_dim, int64_t tokens, uint16_t* out);

}  // namespace cute_kernels::cpu
