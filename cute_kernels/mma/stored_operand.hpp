// A compressed operand as the main loops see it: how its storage is laid out and coded, and the type that multiplies.
#pragma once

#include <stdexcept>
#include <string>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/format/codec/codec.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"

namespace cute_kernels::mma {

template <class TileFormat_, class Codec_, class Element_>
struct StoredOperand {
  using TileFormat = TileFormat_;
  using Codec = Codec_;
  using Element = Element_;
};

// Calls f(StoredOperand{}) with what kernels of CC 8.x and 9.0 are instantiated for. std::runtime_error for another.
template <class F>
decltype(auto) visit_stored_operand(format::CodecId codec, F&& f) {
  using format::BitmapTile;
  switch (codec) {
    case format::CodecId::kFp16:
      return f(StoredOperand<BitmapTile, format::Fp16Codec, half_t>{});
    case format::CodecId::kBf16:
      return f(StoredOperand<BitmapTile, format::Bf16Codec, bfloat16_t>{});
    default:
      throw std::runtime_error(std::string("codec '") + format::codec_name(codec) +
                               "' is not instantiated for CUDA kernels; fp16 and bf16 are");
  }
}

}  // namespace cute_kernels::mma
