// Units of exactly two of four: of a block of 16 x 64 elements a lane has 16 neighbouring columns of two rows, four groups
// each, whose metadata is one word. So it reads four neighbouring lanes' values at once. Lanes hold the selectors of all
// metadata, one each, for one another.
#pragma once

#include <cutlass/arch/memory.h>

#include "cute_kernels/mma/pair_decoder.hpp"
#include "cute_kernels/ops/attention/prefill/lane_units.hpp"
#include "cute_kernels/ops/attention/prefill/unit_scales.hpp"

namespace cute_kernels::attention::prefill {

template <class Codec, class Element, format::Role kRole, int kHeadDim>
class LaneUnits<format::TwoOfFourTile, Codec, Element, kRole, kHeadDim> {
  using TileFormat = format::TwoOfFourTile;
  using Decoder = mma::Decoder<TileFormat, Codec>;
  static constexpr int kBlockGroups = 4;  // of a lane in one of its rows

 public:
  static constexpr int kSteps = kHeadDim / 64, kStepBlocks = 1;
  static constexpr bool kUnrolls = true;

  CUTE_DEVICE LaneUnits(uint32_t block, int part, uint32_t scratch)
      : selectors_(mma::group_selectors(lane() % 16)),
        metadata_(block + part * kSteps * format::kRowBytes + 4 * (4 * row() + quarter())),
        values_(block + (kFirstValueRow + part * kSteps * kBlockRows + value_row()) * format::kRowBytes + 16 * row()),
        scales_(block, part, scratch) {}

  template <class Store>
  CUTE_DEVICE void decode(int step, Store&& store) {
    uint32_t metadata = ptx::load_shared_u32(metadata_ + step * format::kRowBytes);
    uint32_t values[2][kBlockGroups];
    load(step, values);
    CUTE_UNROLL
    for (int unit = 0; unit < 2; ++unit) {
      CUTE_UNROLL
      for (int row = 0; row < 2; ++row) {
        uint32_t elements[4];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          int group = 2 * unit + i;
          uint32_t selectors = __shfl_sync(~0u, selectors_, metadata >> 4 * (kBlockGroups * row + group), 16);
          spread_pair(scales_, row, unit, values[row][group], selectors, 2 * i, 1, elements);
        }
        store(0, row, unit, elements);
      }
    }
  }

 private:
  static constexpr int kFirstValueRow = TileFormat::template first_value_row<Codec>(kHeadDim);
  static constexpr int kBlockRows = 2 * Decoder::kRows;  // of values: two atoms
  uint32_t selectors_, metadata_, values_;
  UnitScales<TileFormat, Codec, Element, kRole, kHeadDim> scales_;

  CUTE_DEVICE static int lane() { return threadIdx.x % 32; }
  CUTE_DEVICE static int row() { return lane() % 8; }
  CUTE_DEVICE static int quarter() { return lane() / 8; }  // of the block's columns: half an atom
  // Of a block's value rows, the first one of the lane's.
  CUTE_DEVICE static int value_row() { return kBlockRows * quarter() / 4; }

  CUTE_DEVICE void load(int step, uint32_t (&values)[2][kBlockGroups]) const {
    uint32_t from = values_ + step * kBlockRows * format::kRowBytes;
    if constexpr (Codec::kValueBits == 16) {
      cutlass::arch::shared_load<16>(values[0], from);
      cutlass::arch::shared_load<16>(values[1], from + format::kRowBytes);
    } else {
      uint32_t words[kBlockGroups];
      cutlass::arch::shared_load<16>(words, from);
      CUTE_UNROLL
      for (int i = 0; i < kBlockGroups; ++i) {
        if constexpr (Codec::kValueBits == 4) words[i] >>= Decoder::kHalfBits * (quarter() % 2);
        Decoder::convert(words[i], values[0][i], values[1][i]);
      }
    }
  }
};

}  // namespace cute_kernels::attention::prefill
