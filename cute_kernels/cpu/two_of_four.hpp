// The tile formats of two of four on the CPU: tables of its layout, selection, and its blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "cute_kernels/cpu/kernels.hpp"
#include "cute_kernels/cpu/tile_steps.hpp"

namespace cute_kernels::cpu {

// A lane's group: where its four elements are, and its metadata.
struct LaneGroup {
  uint16_t position[format::TwoOfFourGroups::kGroup];  // token_position * padded_head_dim + channel_position
  uint16_t metadata_word;                              // of the block
  uint8_t metadata_bit;
};

// [lane * lane_groups + group]. std::invalid_argument for a head_dim that no tile has.
std::vector<LaneGroup> const& lane_groups(format::Role role, int padded_head_dim);

// As write_block and read_block, for views of these tile formats. Of every group of `dense` the two largest are written,
// ties to the first. Returns how many values were dropped for which there were no rows.
int write_two_of_four(SparseView const& view, uint16_t const* dense, TileScales const& scales, int rows,
                      uint32_t* block);
void read_two_of_four(SparseView const& view, uint32_t const* block, TileScales const& scales, uint16_t* dense);

// A block as the products take it: with 16 bits its nonzeros, else the numbers of all its stored codes, without scales. The
// tile has room for streams of padded_head_dim values.
void unpack_two_of_four(SparseView const& view, uint32_t const* block, UnpackedTile const& tile);

}  // namespace cute_kernels::cpu
