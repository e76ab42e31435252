// Where decoded elements lie in a stage: both K (tokens x channels) and V^T (channels x tokens) have rows of 128 bytes,
// or several of them side by side, whose 16-byte units are swizzled as WGMMA reads its B operand.
//
// The order along the product's k is free, if both operands have it: P comes out of S in the order that O += P V takes
// if rows of K have the order of columns of V^T. So columns are put such that the 8 elements of a unit are a lane's, and
// rows such that the 8 lanes of a quarter of a warp store to different banks.
//
// OperandLayout<TileFormat> has
//   position_of_column, row_of_token       channel position of a column of K, token position of a column of V^T or of S; row of K
//                                          of a token position: the column of V^T that has it
//   row_of_channel, channel_of_row         row of V^T of a channel position, and back: 8 channels are 8 rows apart
//   kTokenRowsApart                        rows of K between token positions that are 8 apart, in a block of 16
//   lane_row, lane_column, kUnitsApart     of a lane in a block of 16 rows x 64 columns: the position of its first row, 8
//                                          before the other one; its first column; units from there to its second unit.
//                                          Positions of its columns are those of the first one and of the distance, added.
//                                          So are those of a pair of every 8 columns
#pragma once

#include "cute_kernels/format/tile/bitmap.hpp"
#include "cute_kernels/format/tile/two_of_four.hpp"
#include "cute_kernels/format/tile/two_of_four_bitmap.hpp"

namespace cute_kernels::attention::prefill {

inline constexpr unsigned kUnitColumns = 8, kUnitBytes = 16, kStageRowBytes = 128;

// The address of an element in row r, from that of its column's element in row 0, is of these bits of r an exclusive or,
// and 8 rows further on such a distance more.
inline constexpr unsigned kEightRowsBytes = 8 * kStageRowBytes;
CUTE_HOST_DEVICE constexpr uint32_t row_bits(unsigned row) { return row % 8 * (kStageRowBytes + kUnitBytes); }

// That of an element some rows further on, from a row whose number has none of the bits of rows % 8.
CUTE_HOST_DEVICE constexpr uint32_t rows_on(uint32_t address, unsigned rows) {
  return (address ^ row_bits(rows)) + rows / 8 * kEightRowsBytes;
}

// Whether rows of the first two swizzled atoms are there, by offsets of elements of 16 bits.
template <class Offsets>
constexpr bool finds_rows(Offsets offsets, unsigned columns) {
  for (unsigned row = 0; row < 16; ++row)
    for (unsigned column = 0; column < columns; column += kUnitColumns)
      if (2 * offsets(row, column) != rows_on(2 * offsets(0u, column), row)) return false;
  return true;
}

// Whether offsets(row, column) is offsets(row, 0) ^ offsets(0, column). At some coordinates: a compiler limits what it
// evaluates.
template <class Offsets>
constexpr bool is_separable(Offsets offsets, unsigned rows, unsigned columns) {
  auto next = [](unsigned i) { return i < 8 ? i + 1 : i + i / 4; };
  for (unsigned row = 0; row < rows; row = next(row))
    for (unsigned column = 0; column < columns; column = next(column))
      if (offsets(row, column) != (offsets(row, 0u) ^ offsets(0u, column))) return false;
  return true;
}

template <class TileFormat>
struct OperandLayout;

// A unit is of two A fragments side by side along K:
//
//   column          8 u + 0, 1       8 u + 2, 3       8 u + 4, 5       8 u + 6, 7
//   of lane u % 4   atom a, a0       atom a + 1, a0   atom a, a2       atom a + 1, a2      a = 2 * (u / 4), a0 .. a3: registers
//
// A quarter of a warp has two rows of 4 units.
template <>
struct OperandLayout<format::BitmapTile> {
  static constexpr unsigned kBlockColumns = 64, kUnitsApart = 4, kTokenRowsApart = 1;

  CUTE_HOST_DEVICE static constexpr unsigned position_of_column(unsigned column) {
    unsigned block = column / kBlockColumns * kBlockColumns, unit = column % kBlockColumns / kUnitColumns;
    unsigned lane = unit % 4, pair = column / 2 % 4, atom = 2 * (unit / 4) + pair % 2;
    return format::BitmapTile::position_of_column(block + 16 * atom + 8 * (pair / 2) + 2 * lane + column % 2);
  }
  CUTE_HOST_DEVICE static constexpr unsigned row_of_token(unsigned position) {
    unsigned atom = position / 16, lane = position / 2 % 4, pair = 2 * (position % 2) + atom % 2;
    return kUnitColumns * (4 * (atom / 2) + lane) + 2 * pair + position / 8 % 2;
  }
  CUTE_HOST_DEVICE static constexpr unsigned row_of_channel(unsigned position) {
    return position / 8 * 8 + position % 8 / 2 + position % 2 * 4;
  }
  CUTE_HOST_DEVICE static constexpr unsigned channel_of_row(unsigned row) {
    return row / 8 * 8 + row % 4 * 2 + row % 8 / 4;
  }

  CUTE_HOST_DEVICE static constexpr unsigned lane_row(unsigned lane) { return lane / 4; }
  CUTE_HOST_DEVICE static constexpr unsigned lane_column(unsigned lane) { return lane % 4 * kUnitColumns; }
};

// The order of the format, which is that of memory. A quarter of a warp has 8 rows of one unit.
template <>
struct OperandLayout<format::TwoOfFourTile> {
  static constexpr unsigned kUnitsApart = 1, kTokenRowsApart = 8;

  CUTE_HOST_DEVICE static constexpr unsigned position_of_column(unsigned column) {
    return format::TwoOfFourTile::position_of_column(column);
  }
  CUTE_HOST_DEVICE static constexpr unsigned row_of_token(unsigned position) { return position; }
  CUTE_HOST_DEVICE static constexpr unsigned row_of_channel(unsigned position) { return position; }
  CUTE_HOST_DEVICE static constexpr unsigned channel_of_row(unsigned row) { return row; }

  CUTE_HOST_DEVICE static constexpr unsigned lane_row(unsigned lane) { return lane % 8; }
  CUTE_HOST_DEVICE static constexpr unsigned lane_column(unsigned lane) { return lane / 8 * 2 * kUnitColumns; }
};

// A unit is a row's two groups of an A fragment of the sparse instruction:
//
//   column          8 u + 0, 1    8 u + 2, 3    8 u + 4, 5    8 u + 6, 7
//   of lane u % 4   a0: 0, 2      a2: 0, 2      a0: 1, 3      a2: 1, 3      elements of a group of four; atom u / 4
//
// A quarter of a warp has two rows of 4 units.
template <>
struct OperandLayout<format::TwoOfFourBitmapTile> {
  static constexpr unsigned kBlockColumns = 64, kUnitsApart = 4, kTokenRowsApart = 16;

  CUTE_HOST_DEVICE static constexpr unsigned position_of_column(unsigned column) {
    unsigned block = column / kBlockColumns * kBlockColumns, unit = column % kBlockColumns / kUnitColumns;
    int pair = column / 2 % 4, element = pair / 2 + 2 * (column % 2);
    return block + 32 * (unit / 4) + 16 * (pair % 2) + 4 * (unit % 4) + element;
  }
  CUTE_HOST_DEVICE static constexpr unsigned row_of_token(unsigned position) {
    unsigned unit = position / 32 * 4 + position / 4 % 4, pair = position / 16 % 2 + position % 2 * 2;
    return kUnitColumns * unit + 2 * pair + position / 2 % 2;
  }
  CUTE_HOST_DEVICE static constexpr unsigned row_of_channel(unsigned position) {
    return OperandLayout<format::BitmapTile>::row_of_channel(position);
  }
  CUTE_HOST_DEVICE static constexpr unsigned channel_of_row(unsigned row) {
    return OperandLayout<format::BitmapTile>::channel_of_row(row);
  }

  CUTE_HOST_DEVICE static constexpr unsigned lane_row(unsigned lane) { return lane / 4; }
  CUTE_HOST_DEVICE static constexpr unsigned lane_column(unsigned lane) { return lane % 4 * kUnitColumns; }
};

template <class TileFormat>
constexpr bool is_consistent() {
  using Order = OperandLayout<TileFormat>;
  for (unsigned i = 0; i < format::kTileTokens; ++i)
    if (Order::position_of_column(Order::row_of_token(i)) != i || Order::channel_of_row(Order::row_of_channel(i)) != i)
      return false;
  for (unsigned i = 0; i + 8 < format::kTileTokens; ++i) {
    unsigned row = Order::row_of_token(i);
    if (Order::row_of_channel(i + 8) != Order::row_of_channel(i) + 8) return false;
    if (i % 16 < 8 &&
        (Order::row_of_token(i + 8) != row + Order::kTokenRowsApart || (row & Order::kTokenRowsApart % 8) != 0))
      return false;
  }
  return true;
}

}  // namespace cute_kernels::attention::prefill
