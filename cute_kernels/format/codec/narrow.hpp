// Codecs of 8 and 4 bits, whose codes are small numbers relative to scales: x is number(code) * scale of the token *
// scale of the channel (scales.hpp). Every code is exact in fp16.
#pragma once

#include <cstring>  // memcpy

#include "cute_kernels/format/codec/bits.hpp"

namespace cute_kernels::format {

CUTE_HOST_DEVICE uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
CUTE_HOST_DEVICE float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

template <CodecId Id, int ValueBits>
struct ScaledCodec : CodecBits<ValueBits> {
  static constexpr CodecId kId = Id;
  static constexpr bool kHasScales = true;
  static constexpr int kScaleRows = 1;  // of a block: a scale of 16 bits for each token

  CUTE_HOST_DEVICE static constexpr bool stores(DType dtype) {
    return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  }
};

// 8-bit floating point of 4 exponent and 3 mantissa bits, OCP's E4M3 ("OCP 8-bit Floating Point Specification", 2023):
// no infinities, NaN is 0x7f with either sign, the largest number is 448, the smallest above zero 2^-9.
struct Fp8Codec : ScaledCodec<CodecId::kFp8, 8> {
  static constexpr char const* kName = "fp8";
  static constexpr float kLargest = 448;
  static constexpr bool kHasNan = true;

  // To the nearest number, of two to the even one, -0 among them; +-448 beyond that; NaN to the one without a sign.
  CUTE_HOST_DEVICE static uint32_t encode(float x) {
    uint32_t const bits = float_bits(x), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    if (magnitude > kInfinity) return kNan;
    uint32_t code;
    if (magnitude < kSmallestNormal)  // the sum rounds to multiples of 2^-9
      code = float_bits(bits_float(magnitude) + kUnitOfSubnormals) - float_bits(kUnitOfSubnormals);
    else
      code = (magnitude - kRebias + (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1)) >> kDropped;
    return sign | (code < kLargestCode ? code : kLargestCode);
  }
  CUTE_HOST_DEVICE static float number(uint32_t code) {
    uint32_t const magnitude = code & kNan, sign = (code & 0x80u) << 24;
    if (magnitude == kNan) return bits_float(sign | 0x7fc00000u);
    if (magnitude < 8) return bits_float(sign | float_bits(static_cast<float>(magnitude) * (1.f / 512)));
    return bits_float(sign | ((magnitude << kDropped) + kRebias));
  }
  CUTE_HOST_DEVICE static constexpr bool is_code(uint32_t code) { return code != 0xff; }
  CUTE_HOST_DEVICE static constexpr uint32_t magnitude(uint32_t code) { return code & kNan; }
  CUTE_HOST_DEVICE static constexpr bool all_finite(uint32_t word) {
    for (; word; word >>= kValueBits)
      if ((word & kNan) == kNan) return false;
    return true;
  }

 private:
  static constexpr uint32_t kNan = 0x7f, kLargestCode = 0x7e, kInfinity = 0x7f800000;
  static constexpr int kDropped = 20;                                            // bits of a float's mantissa
  static constexpr uint32_t kRebias = 120u << 23, kSmallestNormal = 121u << 23;  // 2^-6
  static constexpr float kUnitOfSubnormals = 16384;                              // a float's last place there is 2^-9
};

// Integers from -kLargest to kLargest, stored with an offset: 0 is no code.
template <CodecId Id, int ValueBits>
struct IntegerCodec : ScaledCodec<Id, ValueBits> {
  static constexpr int kOffset = 1 << (ValueBits - 1);
  static constexpr float kLargest = kOffset - 1;
  static constexpr bool kHasNan = false;

  // To the nearest integer, of two to the even one; saturates. NaN, which compression refuses, becomes the least.
  CUTE_HOST_DEVICE static uint32_t encode(float x) {
    constexpr float kRound = 12582912.f;  // 1.5 * 2^23: a float's last place there is 1
    x = x > -kLargest ? x : -kLargest;
    x = x < kLargest ? x : kLargest;
    return float_bits(x + kRound) - float_bits(kRound) + kOffset;
  }
  CUTE_HOST_DEVICE static float number(uint32_t code) { return static_cast<float>(static_cast<int>(code) - kOffset); }
  CUTE_HOST_DEVICE static constexpr bool is_code(uint32_t code) { return code != 0; }
  CUTE_HOST_DEVICE static constexpr uint32_t magnitude(uint32_t code) {
    return code < kOffset ? kOffset - code : code - kOffset;
  }
  CUTE_HOST_DEVICE static constexpr bool all_finite(uint32_t) { return true; }
};

struct Int8Codec : IntegerCodec<CodecId::kInt8, 8> {
  static constexpr char const* kName = "int8";
};
struct Int4Codec : IntegerCodec<CodecId::kInt4, 4> {
  static constexpr char const* kName = "int4";
};

}  // namespace cute_kernels::format
