// fp16 and bf16, stored bit for bit.
#pragma once

#include "cute_kernels/format/codec/bits.hpp"

namespace cute_kernels::format {

template <CodecId Id, DType X, uint32_t Exponent>
struct HalfCodec : CodecBits<16> {
  static constexpr CodecId kId = Id;
  static constexpr bool kHasScales = false;
  static constexpr int kScaleRows = 0;
  static constexpr bool kHasNan = true;

  CUTE_HOST_DEVICE static constexpr bool stores(DType dtype) { return dtype == X; }
  CUTE_HOST_DEVICE static constexpr uint32_t magnitude(uint32_t bits) { return bits & 0x7fffu; }
  CUTE_HOST_DEVICE static constexpr bool all_finite(uint32_t word) {
    return (word & Exponent) != Exponent && (word >> 16 & Exponent) != Exponent;
  }
};

struct Fp16Codec : HalfCodec<CodecId::kFp16, DType::kFloat16, 0x7c00u> {
  static constexpr char const* kName = "fp16";
};
struct Bf16Codec : HalfCodec<CodecId::kBf16, DType::kBFloat16, 0x7f80u> {
  static constexpr char const* kName = "bf16";
};

}  // namespace cute_kernels::format
