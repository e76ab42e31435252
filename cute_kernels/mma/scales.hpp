// The scales of a narrow codec around the MMA: those of channels go into B, those of tokens where tokens are rows of the
// accumulators.
#pragma once

#include <cute/tensor.hpp>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::mma {

using namespace cute;

// Two bf16 of a word.
CUTE_DEVICE float2 scale_pair(uint32_t word) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

CUTE_DEVICE float power_of_two_float(int exponent) {  // exponent in [-126, 127]
  return __int_as_float((exponent + 127) << 23);
}

// The scales of the tokens that a lane's accumulators are of, kBlocks blocks of 16 from one on: positions 16 m + 8 j +
// lane / 4 beyond the first.
template <int kBlocks>
struct LaneScales {
  float of[kBlocks][2];

  LaneScales() = default;
  // row: the scales of a tile, in shared memory.
  CUTE_DEVICE LaneScales(uint8_t const* row, int first_block) {
    static_assert(format::scale_index(8) == 1 && format::scale_index(1) == format::kTileTokens / 8 && kBlocks % 2 == 0);
    auto const* from = reinterpret_cast<uint2 const*>(row + 16 * (ptx::lane_index() / 4) + 4 * first_block);
    CUTE_UNROLL
    for (int m = 0; m < kBlocks; m += 2) {
      uint2 words = from[m / 2];
      float2 first = scale_pair(words.x), second = scale_pair(words.y);
      of[m][0] = first.x, of[m][1] = first.y, of[m + 1][0] = second.x, of[m + 1][1] = second.y;
    }
  }
};

// Rows of q as B, times the scales of channels and, row by row, a power of two with which the largest product of a row
// is in [2^14, 2^15): fp16 then holds what matters, whatever the dtype and size of q.
inline constexpr int kLargestExponent = 14;

// The exponent of that power, of a row's largest product.
CUTE_DEVICE int shift_of(float largest) {
  int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  return kLargestExponent - max(-100, min(exponent, 127));
}
// The same in all lanes of a quad, which share the row.
CUTE_DEVICE int row_shift(float largest) {
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  return shift_of(largest);
}

// Fragments of rows 8 n + lane / 4 at all columns of K. product(lane, n, v, k): q times the channel's scale, as float; n,
// v, k: of the fragment. undo[2 n + i]: what the accumulators of rows 8 n + 2 (lane % 4) + i must be multiplied by.
template <class Fragment, class Product, int kRows>
CUTE_DEVICE void load_scaled_rows(Fragment& tCrB /* ((2,2),MMA_N,MMA_K) */, Product&& product, float (&undo)[kRows]) {
  using Element = typename Fragment::value_type;
  CUTE_STATIC_ASSERT_V(size<1>(tCrB) == Int<kRows / 2>{});
  int lane = ptx::lane_index();
  CUTE_UNROLL
  for (int n = 0; n < size<1>(tCrB); ++n) {
    float largest = 0;
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrB); ++k) {
      CUTE_UNROLL
      for (int v = 0; v < 4; ++v) largest = fmaxf(largest, fabsf(product(lane, n, v, k)));  // ignores NaN
    }
    int shift = row_shift(largest);
    float factor = power_of_two_float(shift);
    uint32_t same = lane;
    ptx::forget(same);  // loads again rather than hold a row as floats, for which registers do not suffice
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrB); ++k) {
      CUTE_UNROLL
      for (int v = 0; v < 4; ++v) tCrB(v, n, k) = Element(product(same, n, v, k) * factor);
    }
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i)  // a lane that loaded row 2 (lane % 4) + i
      undo[2 * n + i] = power_of_two_float(-__shfl_sync(~0u, shift, 4 * (2 * (lane % 4) + i)));
  }
}

// A warp's part of O^T, channel positions 16 m + 8 j + lane / 4 beyond the first, times the scales of its channels, or
// divided by them. scales: of a head, by position.
template <bool kDivide, class Fragment>
CUTE_DEVICE void scale_channels(Fragment& tCrO /* ((2,2),MMA_M,MMA_N) */, uint16_t const* scales, int first_block) {
  uint16_t const* of_lane = scales + 16 * first_block + ptx::lane_index() / 4;
  CUTE_UNROLL
  for (int m = 0; m < size<1>(tCrO); ++m) {
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      float scale = format::scale_value(__ldg(of_lane + 16 * m + 8 * j));
      if (kDivide) scale = ptx::reciprocal_approximate(scale);
      CUTE_UNROLL
      for (int n = 0; n < size<2>(tCrO); ++n) {
        tCrO(make_coord(0, j), m, n) *= scale;
        tCrO(make_coord(1, j), m, n) *= scale;
      }
    }
  }
}

}  // namespace cute_kernels::mma
