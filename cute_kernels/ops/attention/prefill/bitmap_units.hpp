// Units of the bitmap tile format: A fragments of two atoms side by side along K.
#pragma once

#include <cute/tensor.hpp>

#include "cute_kernels/mma/quarter_tile.hpp"
#include "cute_kernels/ops/attention/prefill/lane_units.hpp"
#include "cute_kernels/ops/attention/prefill/unit_scales.hpp"

namespace cute_kernels::attention::prefill {

using namespace cute;

template <class Codec, class Element, format::Role kRole, int kHeadDim>
class LaneUnits<format::BitmapTile, Codec, Element, kRole, kHeadDim> {
  using TileFormat = format::BitmapTile;
  using Quarter = mma::QuarterTile<TileFormat, Codec, kHeadDim, false>;  // while a warp waits others decode
  static_assert(Quarter::kWordAtoms == 4 && format::kTileTokens == 64);

 public:
  // A word at a time, two atoms of it, if there are scales: for more of both registers do not suffice.
  static constexpr bool kUnrolls = !Codec::kHasScales;
  static constexpr int kStepBlocks = Codec::kHasScales ? 1 : Quarter::kStepWords;
  static constexpr int kSteps = Quarter::kWords / kStepBlocks;

  CUTE_DEVICE LaneUnits(uint32_t block, int part, uint32_t scratch)
      : quarter_(block, part), scales_(block, part, scratch) {}

  template <class Store>
  CUTE_DEVICE void decode(int step, Store&& store) {
    if constexpr (Codec::kHasScales) {
      uint32_t word = quarter_.word(step);
      CUTE_UNROLL
      for (int unit = 0; unit < 2; ++unit) {
        Tensor atoms = make_tensor<uint32_t>(Int<8>{});
        quarter_.decode_atoms(word, 2 * unit, atoms);
        store_unit(0, unit, &atoms(0), store);
      }
    } else {
      Tensor registers = make_tensor<uint32_t>(Int<4 * Quarter::kWordAtoms * kStepBlocks>{});
      quarter_.decode(step, registers);
      CUTE_UNROLL
      for (int i = 0; i < kStepBlocks; ++i) {
        CUTE_UNROLL
        for (int unit = 0; unit < 2; ++unit) store_unit(i, unit, &registers(16 * i + 8 * unit), store);
      }
    }
  }

 private:
  Quarter quarter_;
  UnitScales<TileFormat, Codec, Element, kRole, kHeadDim> scales_;

  // atoms: the registers of two.
  template <class Store>
  CUTE_DEVICE void store_unit(int block, int unit, uint32_t const* atoms, Store&& store) const {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      uint32_t elements[4];
      CUTE_UNROLL
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t of_atom = atoms[4 * (pair % 2) + row + pair / 2 * 2];
        elements[pair] = scales_.of_columns(unit, pair, scales_.of_row(row, of_atom));
      }
      store(block, row, unit, elements);
    }
  }
};

}  // namespace cute_kernels::attention::prefill
