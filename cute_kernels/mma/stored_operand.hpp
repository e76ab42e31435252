// A compressed operand as the main loops see it: how its storage is laid out and coded, and the type that multiplies.
#pragma once

#include <type_traits>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/format/codec/codec.hpp"
#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::mma {

// Stored bit for bit: what multiplies is what was stored.
template <class TileFormat_, class Codec_, class Element_>
struct StoredOperand {
  using TileFormat = TileFormat_;
  using Codec = Codec_;
  using Element = Element_;  // multiplies
  using Dense = Element_;    // of q, of a window and of results
};

// Of a codec with scales: the numbers of its codes multiply, in fp16, whatever the dtype of what they stand for. So
// kernels are the same for both: they have q, a window and results as bits, and learn the dtype when they run.
template <class TileFormat_, class Codec_>
struct ScaledOperand {
  using TileFormat = TileFormat_;
  using Codec = Codec_;
  using Element = half_t;
  using Dense = uint16_t;
};

// Codecs that share a launcher: of the bitmap format those of 16 bits and narrow ones; all codecs of exactly two of four;
// narrow ones of at most two, for with 16 bits the bitmap format is as fast and smaller.
struct HalfCodecs {};
struct NarrowCodecs {};
struct TwoOfFourCodecs {};
struct TwoOfFourBitmapCodecs {};

template <class Codecs>
inline constexpr bool kAreTwoOfFour = std::is_same_v<Codecs, TwoOfFourCodecs>;
template <class Codecs>
inline constexpr bool kAreTwoOfFourBitmap = std::is_same_v<Codecs, TwoOfFourBitmapCodecs>;
template <class Codecs>
inline constexpr bool kHaveFewKernels = !std::is_same_v<Codecs, HalfCodecs>;
template <class Codecs>
inline constexpr bool kHaveProducts = !kAreTwoOfFourBitmap<Codecs>;  // kernels of sparse_qk and sparse_av
// Kernels of attention of many query rows, with operands of type Element, for codecs of 16 bits and for narrow ones, which
// multiply in fp16 whatever the dtype of the cache.
template <class Codecs>
inline constexpr bool kHavePrefillOfHalf = std::is_same_v<Codecs, HalfCodecs> || kAreTwoOfFour<Codecs>;
template <class Codecs, class Element>
inline constexpr bool kHavePrefillOfNarrow = std::is_same_v<Element, half_t> && !std::is_same_v<Codecs, HalfCodecs>;

// f(codecs) with those that a storage's is of.
template <class F>
decltype(auto) visit_codecs(format::TileFormatId tile_format, format::CodecId codec, F&& f) {
  if (tile_format == format::TileFormatId::kTwoOfFour) return f(TwoOfFourCodecs{});
  if (tile_format == format::TileFormatId::kTwoOfFourBitmap) return f(TwoOfFourBitmapCodecs{});
  return format::is_narrow(codec) ? f(NarrowCodecs{}) : f(HalfCodecs{});
}
template <class F>
decltype(auto) visit_codecs(format::SparseView const& view, F&& f) {
  return visit_codecs(view.tile_format, view.codec, std::forward<F>(f));
}

// Calls f(operand) with what kernels of CC 8.x and 9.0 are instantiated for: a codec of Codecs.
template <class Codecs, class F>
decltype(auto) visit_stored_operand(format::CodecId codec, F&& f) {
  using format::BitmapTile;
  if constexpr (kAreTwoOfFour<Codecs>) {
    using format::TwoOfFourTile;
    return format::visit_codec(codec, [&](auto of) -> decltype(auto) {
      using Codec = decltype(of);
      if constexpr (Codec::kHasScales)
        return f(ScaledOperand<TwoOfFourTile, Codec>{});
      else
        return f(StoredOperand<TwoOfFourTile, Codec,
                               std::conditional_t<Codec::kId == format::CodecId::kFp16, half_t, bfloat16_t>>{});
    });
  } else if constexpr (!kHaveFewKernels<Codecs>) {
    if (codec == format::CodecId::kFp16) return f(StoredOperand<BitmapTile, format::Fp16Codec, half_t>{});
    return f(StoredOperand<BitmapTile, format::Bf16Codec, bfloat16_t>{});
  } else {
    using TileFormat = std::conditional_t<kAreTwoOfFourBitmap<Codecs>, format::TwoOfFourBitmapTile, BitmapTile>;
    if (!format::is_narrow(codec))
      throw std::runtime_error(std::string("there are no CUDA kernels for codec ") + format::codec_name(codec) +
                               " in the tile format " + TileFormat::kName);
    if (codec == format::CodecId::kFp8) return f(ScaledOperand<TileFormat, format::Fp8Codec>{});
    if (codec == format::CodecId::kInt8) return f(ScaledOperand<TileFormat, format::Int8Codec>{});
    return f(ScaledOperand<TileFormat, format::Int4Codec>{});
  }
}

}  // namespace cute_kernels::mma
