// The decoder of at most two of four: that of a bitmap, over the slots.
#pragma once

#include <type_traits>

#include "cute_kernels/format/tile/two_of_four_bitmap.hpp"
#include "cute_kernels/mma/bitmap16_decoder.hpp"
#include "cute_kernels/mma/narrow_decoder.hpp"

namespace cute_kernels::mma {

template <class Codec, class Packed = format::TwoOfFourBitmapTile::Packed<Codec>>
using BitmapDecoder = std::conditional_t<Codec::kIsNarrow, NarrowDecoder<Packed>, Bitmap16Decoder>;

template <class Codec>
struct SlotDecoder : BitmapDecoder<Codec> {
  using TileFormat = format::TwoOfFourBitmapTile;
  using Base = BitmapDecoder<Codec>;

  template <int kHeadDim, int kParts>
  CUTE_DEVICE static auto first(uint32_t lane_column, int part) {
    return Base::template first<TileFormat::slot_dim(kHeadDim), kParts>(
        lane_column + TileFormat::metadata_rows(kHeadDim) * format::kRowBytes, part);
  }
};

template <class Codec>
struct Decoder<format::TwoOfFourBitmapTile, Codec> : SlotDecoder<Codec> {};

}  // namespace cute_kernels::mma
