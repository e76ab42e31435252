// The scales of tokens in units of a narrow codec: numbers of codes, in fp16, are multiplied by them, those of a row by the
// scale of keys, those of a column by that of values. Scales of channels are in q and in the output (scales.hpp), so what
// multiplies is relative to its channel's scale, whatever the dtype of the cache.
#pragma once

#include <cutlass/arch/memory.h>

#include <type_traits>

#include "cute_kernels/common/pack_halves.hpp"
#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/mma/scales.hpp"
#include "cute_kernels/ops/attention/prefill/operand_layout.hpp"

namespace cute_kernels::attention::prefill {

using namespace cute;

// Of a codec that stores elements bit for bit there are none.
template <class TileFormat, class Codec, class Element, format::Role kRole, int kHeadDim,
          bool kHasScales = Codec::kHasScales>
class UnitScales {
 public:
  CUTE_DEVICE UnitScales(uint32_t, int, uint32_t) {}
  CUTE_DEVICE uint32_t of_row(int, uint32_t elements) const { return elements; }
  CUTE_DEVICE uint32_t of_columns(int, int, uint32_t elements) const { return elements; }
};

template <class TileFormat, class Codec, class Element, format::Role kRole, int kHeadDim>
class UnitScales<TileFormat, Codec, Element, kRole, kHeadDim, true> {
  using Order = OperandLayout<TileFormat>;
  static_assert(std::is_same_v<Element, half_t>);

 public:
  // block, scratch: shared-memory addresses, the latter of kScaleScratchBytes of the warp's own. part: the quarter of the
  // tile.
  CUTE_DEVICE UnitScales(uint32_t block, int part, uint32_t scratch) {
    uint32_t token_scales = block + TileFormat::scale_row(kHeadDim) * format::kRowBytes;
    int lane = threadIdx.x % 32;
    if constexpr (kRole == format::Role::kKey) {
      static_assert(format::scale_index(8) == 1 && format::scale_index(1) == 8);
      float2 pair = mma::scale_pair(ptx::load_shared_u32(token_scales + 16 * Order::lane_row(lane) + 4 * part));
      scales_[0] = to_elements(pair.x, pair.x), scales_[1] = to_elements(pair.y, pair.y);
    } else {
      // A lane converts those of two neighbouring columns, for all of the warp.
      auto scale_of = [&](int column) {
        int index = format::scale_index(Order::position_of_column(column));
        return format::scale_value(static_cast<uint16_t>(ptx::load_shared_u16(token_scales + 2 * index)));
      };
      uint32_t pair = to_elements(scale_of(2 * lane), scale_of(2 * lane + 1));
      __syncwarp();  // all have read those of the block before
      cutlass::arch::shared_store<4>(scratch + 4 * lane, &pair);
      __syncwarp();
      uint32_t first = scratch + 2 * Order::lane_column(lane);
      cutlass::arch::shared_load<16>(scales_, first);
      cutlass::arch::shared_load<16>(scales_ + 4, first + Order::kUnitsApart * kUnitBytes);
    }
  }

  // Two numbers, of keys times the scale of their row, wherever in it they are.
  CUTE_DEVICE uint32_t of_row(int row, uint32_t numbers) const {
    return kRole == format::Role::kKey ? ptx::multiply_halves(numbers, scales_[row]) : numbers;
  }
  // Two of a unit, of values times the scales of their columns.
  CUTE_DEVICE uint32_t of_columns(int unit, int pair, uint32_t numbers) const {
    return kRole == format::Role::kKey ? numbers : ptx::multiply_halves(numbers, scales_[4 * unit + pair]);
  }

 private:
  uint32_t scales_[kRole == format::Role::kKey ? 2 : 8];  // as elements: of both rows, or of both units' columns

  // No number times a scale is beyond fp16: what is farther above its channel's mean is taken as so much.
  CUTE_DEVICE static uint32_t to_elements(float x0, float x1) {
    constexpr float kLargestScale = 64000 / Codec::kLargest;
    return to_pair<Element>(fminf(x0, kLargestScale), fminf(x1, kLargestScale));
  }
};

// Two values of a row's group of four, over its elements by the group's selectors (mma::group_selectors), times their
// scales: into pairs `first` and first + step of a unit.
template <class Scales>
CUTE_DEVICE void spread_pair(Scales const& scales, int row, int unit, uint32_t values, uint32_t selectors, int first,
                             int step, uint32_t (&elements)[4]) {
  uint32_t scaled = scales.of_row(row, values);
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    int pair = first + half * step;
    elements[pair] = scales.of_columns(unit, pair, ptx::permute_bytes(scaled, 0, selectors >> 16 * half));
  }
}

}  // namespace cute_kernels::attention::prefill
