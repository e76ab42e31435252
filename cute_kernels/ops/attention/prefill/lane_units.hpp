// The seam between a stored tile and an operand stage: a policy that expands a lane's part of a block into units of 16
// bytes as WGMMA reads them, by tile format and codec.
//
// A warp has a quarter of a tile: blocks of 16 rows x 64 columns, of keys side by side, of values one below the other. Of
// each a lane has four units, in two rows 8 apart two each; OperandLayout says where.
//
// LaneUnits<TileFormat, Codec, Element, kRole, kHeadDim> has
//   LaneUnits(block, part,   block: shared-memory address; part: the quarter; scratch: shared-memory address of
//             scratch)       kScaleScratchBytes of the warp's own, for codecs with scales
//   kSteps, kStepBlocks      how a quarter's blocks are decoded: so many together
//   kUnrolls                 whether code of all steps is to be side by side
//   decode(step, store)      store(block of the step, row, unit, elements): 8 in the order of columns, two a register, of
//                            a codec with scales times those of their tokens; steps in order
#pragma once

#include "cute_kernels/format/tile/tile.hpp"

namespace cute_kernels::attention::prefill {

template <class TileFormat, class Codec, class Element, format::Role kRole, int kHeadDim>
class LaneUnits {
  static_assert(sizeof(Codec) == 0, "no operand is made of this tile format and codec");
};

}  // namespace cute_kernels::attention::prefill

#include "cute_kernels/ops/attention/prefill/bitmap_units.hpp"
#include "cute_kernels/ops/attention/prefill/pair_units.hpp"
#include "cute_kernels/ops/attention/prefill/slot_units.hpp"
