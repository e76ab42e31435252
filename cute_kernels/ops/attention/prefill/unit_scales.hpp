// The scales of a narrow codec in units: numbers of codes become elements, both in fp16. A row's scale is one of a token of
// keys or of a channel of values; those of columns are the others'.
#pragma once

#include <cutlass/arch/memory.h>
#include <cutlass/numeric_conversion.h>

#include <type_traits>

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
  CUTE_DEVICE void begin(int) {}
  CUTE_DEVICE uint32_t of_row(int, uint32_t elements) const { return elements; }
  CUTE_DEVICE uint32_t of_columns(int, int, int, uint32_t elements) const { return elements; }
};

template <class TileFormat, class Codec, class Element, format::Role kRole, int kHeadDim>
class UnitScales<TileFormat, Codec, Element, kRole, kHeadDim, true> {
  using Order = OperandLayout<TileFormat>;
  static constexpr int kBytes = sizeof(Element);
  static_assert(std::is_same_v<Element, half_t>);

 public:
  // Shared-memory addresses; see LaneUnits.
  CUTE_DEVICE UnitScales(uint32_t block, int warp, uint32_t channel_scales) {
    uint32_t token_scales = block + TileFormat::scale_row(kHeadDim) * format::kRowBytes;
    int lane = threadIdx.x % 32, row = Order::lane_row(lane), first_column = Order::lane_column(lane);
    if constexpr (kRole == format::Role::kKey) {
      static_assert(format::scale_index(8) == 1 && format::scale_index(1) == 8);
      channels_ = channel_scales + first_column * kBytes;
      float2 pair = mma::scale_pair(ptx::load_shared_u32(token_scales + 16 * row + 4 * warp));
      rows_[0] = pair.x, rows_[1] = pair.y;
    } else {
      channels_ = channel_scales + (kHeadDim / 4 * warp + row) * kBytes;
      uint32_t first = token_scales + 2 * format::scale_index(Order::position_of_column(first_column));
      auto scale_of = [&](int distance) {
        int index = format::scale_index(Order::position_of_column(distance));  // adds up, as positions do
        return format::scale_value(static_cast<uint16_t>(ptx::load_shared_u16(first + 2 * index)));
      };
      CUTE_UNROLL
      for (int unit = 0; unit < 2; ++unit) {
        CUTE_UNROLL
        for (int pair = 0; pair < 4; ++pair) {
          int distance = Order::kUnitsApart * kUnitColumns * unit + 2 * pair;
          columns_[unit][pair] = to_elements(scale_of(distance), scale_of(distance + 1));
        }
      }
    }
  }

  // Of a block of the warp's quarter, before its elements.
  CUTE_DEVICE void begin(int block) {
    if constexpr (kRole == format::Role::kKey) {
      CUTE_UNROLL
      for (int unit = 0; unit < 2; ++unit) {
        int column = 64 * block + Order::kUnitsApart * kUnitColumns * unit;
        cutlass::arch::shared_load<16>(columns_[unit], channels_ + column * kBytes);
      }
    } else {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        uint32_t bits = ptx::load_shared_u16(channels_ + (16 * block + 8 * i) * kBytes);
        rows_[i] = static_cast<float>(Element::bitcast(static_cast<uint16_t>(bits)));
      }
    }
  }

  // The scale of a token comes first: times it a number is as large as the element is beside others of its channel, which
  // fp16 holds. Not so times that of its channel, which may be of any size.

  // Two numbers; of keys times the scale of the first or the second row.
  CUTE_DEVICE uint32_t of_row(int row, uint32_t numbers) const {
    if constexpr (kRole == format::Role::kValue) return numbers;
    return ptx::multiply_halves(numbers, to_elements(rows_[row], rows_[row]));
  }

  // Two of a row and unit times the scales of their columns; of values times that of their row, too.
  CUTE_DEVICE uint32_t of_columns(int row, int unit, int pair, uint32_t numbers) const {
    uint32_t elements = ptx::multiply_halves(numbers, columns_[unit][pair]);
    if constexpr (kRole == format::Role::kValue)
      elements = ptx::multiply_halves(elements, to_elements(rows_[row], rows_[row]));
    return elements;
  }

 private:
  uint32_t channels_;  // of the columns of keys, of the rows of values
  float rows_[2];
  uint32_t columns_[2][4];  // as elements

  CUTE_DEVICE static uint32_t to_elements(float x0, float x1) {
    cutlass::Array<float, 2> pair;
    pair[0] = x0, pair[1] = x1;
    auto converted = cutlass::NumericArrayConverter<Element, float, 2>{}(pair);
    return *reinterpret_cast<uint32_t const*>(&converted);
  }
};

}  // namespace cute_kernels::attention::prefill
