// How one value is stored. A codec is a policy type:
//
//   kId, kName            its number in SparseView and its name in Python and in files
//   kValueBits            of a stored value
//   kValuesPerRow         values of one stream in a value row; see CodecBits (bits.hpp)
//   kHasScales            whether values are stored relative to a scale kept beside them
//   stores(dtype)         whether x may be of this dtype. The dtype of x is also what decompression returns, and the
//                         operand type of the products
//   encode(bits, dtype)   bits of x's dtype -> stored bits; a value that rounds to zero gives a zero of either sign
//   decode(stored, dtype) stored bits -> bits of x's dtype; exact
//   is_zero(stored)       such values are not in the bitmap and in no stream
//   all_finite(word)      of the values in a 32-bit word of a value row
//
// A tile format (tile/tile.hpp) says which values a stream has, in which order, and which 16 bits of a lane's word are
// the stream's. The codec says how many values these 16 bits hold, and so how many rows a stream takes.
#pragma once

#include <stdexcept>
#include <string>

#include "cute_kernels/format/codec/e4m3.hpp"
#include "cute_kernels/format/codec/half.hpp"

namespace cute_kernels::format {

// f(codec). std::invalid_argument for a number that no codec has.
template <class F>
decltype(auto) visit_codec(CodecId id, F&& f) {
  switch (id) {
    case CodecId::kFp16:
      return f(Fp16Codec{});
    case CodecId::kBf16:
      return f(Bf16Codec{});
    case CodecId::kE4m3:
      return f(E4m3Codec{});
  }
  throw std::invalid_argument("there is no codec " + std::to_string(static_cast<int>(id)) +
                              "; 0 is fp16, 1 bf16, 2 e4m3");
}

inline char const* codec_name(CodecId id) {
  return visit_codec(id, [](auto codec) { return decltype(codec)::kName; });
}

// std::invalid_argument if the codec does not store x of this dtype.
inline void check_codec(CodecId id, DType dtype) {
  visit_codec(id, [&](auto codec) {
    static_assert(!codec.kHasScales, "SparseView holds no scales");
    if (!codec.stores(dtype))
      throw std::invalid_argument(std::string("codec ") + codec.kName + " does not store " + dtype_name(dtype));
  });
}

// The codec that stores x of this dtype bit for bit.
inline CodecId own_codec(DType dtype) {
  if (dtype == DType::kFloat16) return CodecId::kFp16;
  if (dtype == DType::kBFloat16) return CodecId::kBf16;
  throw std::invalid_argument(std::string("no codec stores ") + dtype_name(dtype) + " bit for bit");
}

}  // namespace cute_kernels::format
