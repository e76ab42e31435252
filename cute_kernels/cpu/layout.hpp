// The tile format's element_layout as tables, and its structure that the products rely on.
#pragma once

#include <cstdint>
#include <vector>

#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::cpu {

using TileFormat = format::BitmapTile;  // that the CPU kernels write and read

// A lane is (row, column) of the atom's A operand: lane = kLaneColumns * row + column.
inline constexpr int kLaneColumns = 4;
inline constexpr int kLaneRows = format::kLanes / kLaneColumns;
inline constexpr int kStreams = TileFormat::kStreams;

// std::invalid_argument for a head_dim that no tile has.
//
// position[lane * lane_elements + e] = token_position * padded_head_dim + channel_position.
std::vector<uint16_t> const& element_table(format::Role role, int padded_head_dim);

// The rows of A come in blocks of 16: 4 blocks of tokens for keys, padded_head_dim / 16 of channels for values. Element
// e of a lane is entry k of its stream s in block c: e = kStreams * (c * entries + k) + s. For keys there are
// padded_head_dim / 4 entries, for values 16, one bitmap word. The element's row of A depends on the lane's row, c and
// k / 2 % 2, its column of A on the lane's column, s and k. A product sums over the columns of A, so its vectors run
// over k, and every other pair of a vector's entries belongs to the same sum.
struct ProductLayout {
  int blocks, entries;
  std::vector<uint8_t> sum_position;      // [row][c][2] -> token position of keys, channel position of values
  std::vector<uint8_t> operand_position;  // [column][s][entries] -> channel position of keys, token position of values
};

ProductLayout const& product_layout(format::Role role, int padded_head_dim);

}  // namespace cute_kernels::cpu
