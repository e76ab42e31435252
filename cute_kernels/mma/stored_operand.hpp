// A compressed operand as the main loops see it: how its storage is laid out and coded, and the type that multiplies.
#pragma once

#include <type_traits>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/format/codec/codec.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"

namespace cute_kernels::mma {

// Stored bit for bit: what multiplies is what was stored.
template <class TileFormat_, class Codec_, class Element_>
struct StoredOperand {
  using TileFormat = TileFormat_;
  using Codec = Codec_;
  using Element = Element_;  // multiplies
  using Dense = Element_;    // of q, of a window and of results
};

// Of a codec with scales: the numbers of its codes multiply, in fp16, whatever the dtype of what they stand for.
template <class TileFormat_, class Codec_, class Dense_>
struct ScaledOperand {
  using TileFormat = TileFormat_;
  using Codec = Codec_;
  using Element = half_t;
  using Dense = Dense_;
};

// Codecs whose kernels are in one object file: those of 16 bits together, each other one by itself.
struct HalfCodecs {};
using Fp8Codecs = format::Fp8Codec;
using Int8Codecs = format::Int8Codec;
using Int4Codecs = format::Int4Codec;

// f(codecs) with those that a codec is of.
template <class F>
decltype(auto) visit_codecs(format::CodecId id, F&& f) {
  return format::visit_codec(id, [&](auto codec) -> decltype(auto) {
    if constexpr (decltype(codec)::kIsNarrow)
      return f(codec);
    else
      return f(HalfCodecs{});
  });
}

// Calls f(operand) with what kernels of CC 8.x and 9.0 are instantiated for: a codec of Codecs, x of `dtype`.
template <class Codecs, class F>
decltype(auto) visit_stored_operand(format::CodecId codec, DType dtype, F&& f) {
  using format::BitmapTile;
  if constexpr (std::is_same_v<Codecs, HalfCodecs>) {
    if (codec == format::CodecId::kFp16) return f(StoredOperand<BitmapTile, format::Fp16Codec, half_t>{});
    return f(StoredOperand<BitmapTile, format::Bf16Codec, bfloat16_t>{});
  } else {
    if (dtype == DType::kFloat16) return f(ScaledOperand<BitmapTile, Codecs, half_t>{});
    return f(ScaledOperand<BitmapTile, Codecs, bfloat16_t>{});
  }
}

}  // namespace cute_kernels::mma
