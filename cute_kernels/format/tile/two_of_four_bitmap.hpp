// The tile format of at most two of four: the A operand of the sparse tensor-core instruction, of which nonzeros alone
// are stored.
//
//   block of a tile = rows of metadata, then bitmap rows, then a row of the tokens' scales if the codec has scales, then
//   value rows.
//
// A slot is a candidate of a group: there are half as many as elements. Slots are stored as BitmapTile stores elements:
// what fills an A register of m16n8k16 there, a pair of elements, is a group's two slots here. So the same decoder gives
// the A fragments of the sparse instruction. With 16 bits a lane has two streams, with a narrow codec one: the longer
// streams are, the more alike are their lengths.
#pragma once

#include "cute_kernels/format/codec/bits.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"
#include "cute_kernels/format/tile/two_of_four.hpp"

namespace cute_kernels::format {

// A codec with the streams that a lane has: one if it is narrow.
template <class Codec, bool kIsNarrow = Codec::kIsNarrow>
struct SlotCodec {
  using type = Codec;
};
template <class Codec>
struct SlotCodec<Codec, true> {
  using type = OneStream<Codec>;
};

struct TwoOfFourBitmapTile : TwoOfFourGroups {
  static constexpr TileFormatId kId = TileFormatId::kTwoOfFourBitmap;
  static constexpr char const* kName = "two_of_four_bitmap";

  using Slots = BitmapTile;

  // As in BitmapTile.
  template <class Codec>
  using Packed = typename SlotCodec<Codec>::type;

  // The head_dim of which BitmapTile has as many elements as there are slots.
  CUTE_HOST_DEVICE static constexpr int slot_dim(int head_dim) { return head_dim * kKept / kGroup; }
  CUTE_HOST_DEVICE static constexpr int lane_slots(int head_dim) { return Slots::lane_elements(slot_dim(head_dim)); }
  CUTE_HOST_DEVICE static constexpr int bitmap_rows(int head_dim) { return Slots::bitmap_rows(slot_dim(head_dim)); }

  CUTE_HOST_DEVICE static constexpr int scale_row(int head_dim) {
    return metadata_rows(head_dim) + bitmap_rows(head_dim);
  }
  template <class Codec>
  CUTE_HOST_DEVICE static constexpr int first_value_row(int head_dim) {
    return scale_row(head_dim) + Codec::kScaleRows;
  }
  template <class Codec>
  CUTE_HOST_DEVICE static constexpr int stream_slots(int head_dim) {
    return lane_slots(head_dim) / Packed<Codec>::kStreams;
  }
  template <class Codec>
  CUTE_HOST_DEVICE static constexpr int max_tile_rows(int head_dim) {
    return first_value_row<Codec>(head_dim) + Packed<Codec>::value_rows(stream_slots<Codec>(head_dim));
  }

  // A lane's slots are numbered register by register. A stream has those of its registers in this order.
  CUTE_HOST_DEVICE static constexpr int slot(int group, int index) { return kKept * group + index; }
  template <class Codec>
  CUTE_HOST_DEVICE static constexpr int stream(int slot) {
    return Packed<Codec>::kStreams == 1 ? 0 : Slots::stream(slots_element(slot));
  }
  CUTE_HOST_DEVICE static constexpr int bitmap_word(int slot) { return Slots::bitmap_word(slot); }
  template <class Codec>
  CUTE_HOST_DEVICE static constexpr int bitmap_bit(int slot) {
    return Slots::bitmap_bit<Codec::kBitDistance>(slots_element(slot));
  }

 private:
  static constexpr int kAtomSlots = kKept * kAtomGroups;

  // The element of BitmapTile in whose place a slot is.
  CUTE_HOST_DEVICE static constexpr int slots_element(int slot) {
    constexpr auto kElements = cute::right_inverse(Slots::ElementOrder{});  // of an atom, by place in its fragment
    static_assert(cute::size(kElements) == kAtomSlots);
    return slot / kAtomSlots * kAtomSlots + kElements(slot % kAtomSlots);
  }
};

}  // namespace cute_kernels::format
