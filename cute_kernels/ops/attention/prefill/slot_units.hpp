// Units of at most two of four: A fragments of the sparse instruction, two atoms side by side along K. A register is two
// slots of a group, which metadata, in another lane's word (ELayout of the atom), spreads over four elements. Lanes hold
// the selectors of all metadata, one each, for one another.
#pragma once

#include <cute/tensor.hpp>

#include "cute_kernels/mma/decoder.hpp"
#include "cute_kernels/ops/attention/prefill/lane_units.hpp"
#include "cute_kernels/ops/attention/prefill/unit_scales.hpp"

namespace cute_kernels::attention::prefill {

using namespace cute;

template <class Codec, class Element, format::Role kRole, int kHeadDim>
class LaneUnits<format::TwoOfFourBitmapTile, Codec, Element, kRole, kHeadDim> {
  using TileFormat = format::TwoOfFourBitmapTile;
  using Decoder = mma::Decoder<TileFormat, Codec>;
  static_assert(Codec::kIsNarrow, "a lane has one stream");
  static constexpr int kWordBlocks = 2;  // of a bitmap word: four atoms

 public:
  static constexpr int kSteps = kHeadDim / 64, kStepBlocks = 1;
  static constexpr bool kUnrolls = false;

  CUTE_DEVICE LaneUnits(uint32_t block, int part, uint32_t scratch)
      : first_block_(part * kSteps),
        selectors_(ptx::permute_bytes(mma::group_selectors(lane() % 16), 0, 0x3120)),
        metadata_(block + first_block_ * format::kRowBytes + 16 * (lane() / 4)),
        bitmap_(block + 4 * lane() + TileFormat::metadata_rows(kHeadDim) * format::kRowBytes),
        at_(Decoder::template first<kHeadDim, 1>(block + 4 * lane(), 0)),
        scales_(block, part, scratch) {
    constexpr int kMostWords = 3 * kSteps / kWordBlocks;  // whole ones before the last part
    CUTE_UNROLL
    for (int i = 0; i < kMostWords; ++i) at_.skip(0, i < first_block_ / kWordBlocks ? __popc(word(i)) : 0);
    if (kSteps % kWordBlocks != 0 && first_block_ % kWordBlocks != 0)
      at_.skip(0, __popc(word(first_block_ / kWordBlocks) & 0xffffu));
  }

  template <class Store>
  CUTE_DEVICE void decode(int step, Store&& store) {
    uint32_t block = slots(first_block_ + step);
    CUTE_UNROLL
    for (int unit = 0; unit < 2; ++unit) {
      Tensor pairs = make_tensor<uint32_t>(Int<4>{});
      Decoder::decode8(block, unit, at_, pairs);
      uint32_t metadata[2];  // of columns from 0 and from 16 of the atom on, of both rows
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j)
        metadata[j] =
            ptx::load_shared_u32(metadata_ + step * format::kRowBytes + 4 * (2 * unit + j)) >> 4 * (lane() % 4);
      CUTE_UNROLL
      for (int row = 0; row < 2; ++row) {
        uint32_t elements[4];
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          uint32_t selectors = __shfl_sync(~0u, selectors_, metadata[j] >> 16 * row, 16);
          spread_pair(scales_, row, unit, pairs(2 * j + row), selectors, j, 2, elements);
        }
        store(0, row, unit, elements);
      }
    }
  }

 private:
  int first_block_;                         // of the tile's
  uint32_t selectors_, metadata_, bitmap_;  // of elements 0, 2 and 1, 3 of a group; shared-memory addresses
  typename Decoder::Cursor at_;
  UnitScales<TileFormat, Codec, Element, kRole, kHeadDim> scales_;

  CUTE_DEVICE static int lane() { return threadIdx.x % 32; }
  CUTE_DEVICE uint32_t word(int index) const { return ptx::load_shared_u32(bitmap_ + index * format::kRowBytes); }
  // The bits of a block, from the lowest on.
  CUTE_DEVICE uint32_t slots(int block) const {
    return word(block / kWordBlocks) >> block % kWordBlocks * (32 / kWordBlocks);
  }
};

}  // namespace cute_kernels::attention::prefill
