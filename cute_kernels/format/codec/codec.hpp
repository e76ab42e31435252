// How one value is stored. A codec is a policy type:
//
//   kId, kName            its number in SparseView and its name in Python and in files
//   kValueBits, ...       where its values are in the rows of a block: see CodecBits (bits.hpp)
//   kHasScales            whether values are stored relative to scales (scales.hpp)
//   kScaleRows            rows of a block, between bitmap and values, that hold the scales of its tokens
//   kHasNan               whether it stores NaN
//   stores(dtype)         whether x may be of this dtype. The dtype of x is also what decompression returns
//   magnitude(value)      of a stored value, as an integer in the order of magnitudes
//   all_finite(word)      of the values in a 32-bit word of a value row
//
// One with scales has besides
//
//   kLargest              the largest number of a code; infinity is none's
//   encode(x)             the code of a float, which is x relative to the scales
//   number(code)          what it stands for
//   is_code(code)         whether `encode` gives it
//
// A tile format (tile/tile.hpp) says which values a stream has, in which order. The codec says where in the rows they
// lie, and so how many rows a stream takes.
#pragma once

#include <stdexcept>
#include <string>

#include "cute_kernels/format/codec/half.hpp"
#include "cute_kernels/format/codec/narrow.hpp"

namespace cute_kernels::format {

// f(codec). std::invalid_argument for a number that no codec has.
template <class F>
decltype(auto) visit_codec(CodecId id, F&& f) {
  switch (id) {
    case CodecId::kFp16:
      return f(Fp16Codec{});
    case CodecId::kBf16:
      return f(Bf16Codec{});
    case CodecId::kFp8:
      return f(Fp8Codec{});
    case CodecId::kInt8:
      return f(Int8Codec{});
    case CodecId::kInt4:
      return f(Int4Codec{});
  }
  throw std::invalid_argument("there is no codec " + std::to_string(static_cast<int>(id)) +
                              "; 0 is fp16, 1 bf16, 2 fp8, 3 int8, 4 int4");
}

inline char const* codec_name(CodecId id) {
  return visit_codec(id, [](auto codec) { return decltype(codec)::kName; });
}
inline bool is_narrow(CodecId id) {
  return visit_codec(id, [](auto codec) { return codec.kIsNarrow; });
}
inline bool has_scales(CodecId id) {
  return visit_codec(id, [](auto codec) { return decltype(codec)::kHasScales; });
}

// std::invalid_argument if the codec does not store x of this dtype.
inline void check_codec(CodecId id, DType dtype) {
  visit_codec(id, [&](auto codec) {
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
