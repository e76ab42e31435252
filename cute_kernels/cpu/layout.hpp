// element_layout as tables, and the structure of it that the products are built on.
#pragma once

#include <cstdint>
#include <vector>

#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::cpu {

// A lane is (row, column) of the atom's A operand: lane = kLaneColumns * row + column.
inline constexpr int kLaneColumns = 4;
inline constexpr int kLaneRows = format::kLanes / kLaneColumns;
inline constexpr int kStreams = format::Codec16::kStreams;
inline constexpr int kTokenBlocks = format::kTileTokens / 16;

// position[lane * lane_elements + e] = token_position * padded_head_dim + channel_position.
const std::vector<uint16_t>& element_table(format::Role role, int padded_head_dim);

// Element e of a lane is entry k of its stream s in block c of 16 tokens: e = kStreams * (c * entries + k) + s. There
// are padded_head_dim / 4 entries, and its position factors into what the lane's row and what the lane's column decide:
//   key    token of (row, c, k), channel of (column, s, k)
//   value  channel of (row, k), token of (column, s, c, k)
// where the token of an entry k depends on k % 2 (key) or k % 4 (value) only. The vectors of a product run over k.
struct ProductLayout {
  int entries;
  // Positions that the entries of a group of 4 share with those of every other group.
  std::vector<uint8_t> token;    // key: [row][c][2]; value: [c][column][s][4]
  std::vector<uint8_t> channel;  // key: [column][s][entries]; value: [row][entries]
};

const ProductLayout& product_layout(format::Role role, int padded_head_dim);

}  // namespace cute_kernels::cpu
