// Where a tile's logits wait in shared memory to be written in rows. From accumulators they come token by token, in the
// order of positions, which differs from tile to tile; rows of the output want tokens in their own order.
//
// So logits lie token after token, in their own order, N query rows of 16 bits each: stmatrix writes units of 8 rows
// (16 bytes) wherever a position's token is, ldmatrix reads 8 x 8 logits transposed. Which 8 tokens make a matrix is
// free: such that a lane's registers hold 16 bytes of consecutive tokens of one row.
//
// 8 units are a wavefront if they lie in different banks. Those of a matrix that is read do, and those of 8 consecutive
// tokens; those of 8 positions that are written lie at random.
#pragma once

#include "cute_kernels/format/tile/bitmap.hpp"

namespace cute_kernels::qk {

inline constexpr int kUnitRows = 8;      // query rows in 16 bytes
inline constexpr int kMatrixTokens = 8;  // ldmatrix and stmatrix move 8 x 8 values of 16 bits, four matrices at once
inline constexpr int kReadTokens = 32;   // of four matrices

template <int kN>
inline constexpr int kLogitsUnits = format::kTileTokens * kN / kUnitRows;

// Where the unit of rows 8 * unit .. 8 * unit + 7 of a token lies, in units. Kernels step by
//   logits_unit(token, a ^ b) == logits_unit(token, a) ^ b
//   logits_unit(token + 32, a) == logits_unit(token, a) + logits_unit(32, 0)
template <int kN>
CUTE_HOST_DEVICE constexpr int logits_unit(int token, int unit) {
  static_assert(kN == 32 || kN == 64);
  constexpr int kUnits = kN / kUnitRows;
  int swizzle = ((token ^ (token >> 2 & 6)) & 7) / (8 / kUnits);
  return token * kUnits + (unit ^ swizzle);
}

// ldmatrix gives register `matrix` of lane l the tokens of the matrix's rows 2 * (l % 4) and 2 * (l % 4) + 1. These
// are tokens of the lane's vectors of kVector: vector i is tokens kVector * (l % 4 + 4 * i), registers one after the
// other.
template <int kVector>
CUTE_HOST_DEVICE constexpr int token_of_matrix_row(int matrix, int row) {
  static_assert(kVector == 4 || kVector == 8);
  int index = 2 * matrix + row % 2, vector = index / kVector;
  return kVector * (row / 2 + 4 * vector) + index % kVector;
}

}  // namespace cute_kernels::qk
