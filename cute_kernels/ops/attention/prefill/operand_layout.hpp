// Where decoded elements lie in a stage: both K (tokens x channels) and V^T (channels x tokens) have rows of 128 bytes,
// or several of them side by side, whose 16-byte units are swizzled as WGMMA reads its B operand.
//
// The order along the product's k is free, if both operands have it. Columns are put such that the 8 elements of a unit
// are a lane's, of two A fragments side by side along K, so that it stores them at once:
//
//   column          8 u + 0, 1       8 u + 2, 3       8 u + 4, 5       8 u + 6, 7
//   of lane u % 4   atom a, a0       atom a + 1, a0   atom a, a2       atom a + 1, a2      a = 2 * (u / 4), a0 .. a3: registers
//
// P comes out of S in the order that O += P V takes if rows of K have the order of columns of V^T. Rows are put such that
// the 8 lanes of a quarter of a warp, two rows of 4 units, store to different banks.
#pragma once

#include "cute_kernels/format/tile/tile.hpp"

namespace cute_kernels::attention::prefill {

template <class TileFormat>
struct OperandLayout {
  static constexpr int kUnitColumns = 8, kBlockColumns = 64;

  // Channel position of a column of K, token position of a column of V^T; also the token position of a column of S.
  CUTE_HOST_DEVICE static constexpr int position_of_column(int column) {
    int block = column / kBlockColumns * kBlockColumns, unit = column % kBlockColumns / kUnitColumns;
    int lane = unit % 4, pair = column / 2 % 4, atom = 2 * (unit / 4) + pair % 2;
    return TileFormat::position_of_column(block + 16 * atom + 8 * (pair / 2) + 2 * lane + column % 2);
  }

  // Row of K of a token position: the column of V^T that has it.
  CUTE_HOST_DEVICE static constexpr int row_of_token(int position) {
    int atom = position / 16, lane = position / 2 % 4, pair = 2 * (position % 2) + atom % 2;
    return kUnitColumns * (4 * (atom / 2) + lane) + 2 * pair + position / 8 % 2;
  }

  // Row of V^T of a channel position, and back.
  CUTE_HOST_DEVICE static constexpr int row_of_channel(int position) {
    return position / 8 * 8 + position % 8 / 2 + position % 2 * 4;
  }
  CUTE_HOST_DEVICE static constexpr int channel_of_row(int row) { return row / 8 * 8 + row % 4 * 2 + row % 8 / 4; }

  static constexpr bool is_consistent() {
    for (int i = 0; i < format::kTileTokens; ++i)
      if (position_of_column(row_of_token(i)) != i || channel_of_row(row_of_channel(i)) != i) return false;
    return true;
  }
};

}  // namespace cute_kernels::attention::prefill
