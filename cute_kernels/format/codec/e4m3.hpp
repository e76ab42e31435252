// 8-bit floating point of 4 exponent and 3 mantissa bits, OCP's E4M3 ("OCP 8-bit Floating Point Specification", 2023):
// no infinities, NaN is 0x7f with either sign, the largest number is 448, the smallest above zero 2^-9.
#pragma once

#include "cute_kernels/format/codec/bits.hpp"

namespace cute_kernels::format {

struct E4m3Codec : CodecBits<8> {
  static constexpr CodecId kId = CodecId::kE4m3;
  static constexpr char const* kName = "e4m3";
  static constexpr bool kHasScales = false;

  CUTE_HOST_DEVICE static constexpr bool stores(DType dtype) {
    return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  }

  // To the nearest number, of two to the even one; +-448 beyond that, infinities included; NaN stays NaN.
  CUTE_HOST_DEVICE static constexpr uint32_t encode(uint16_t bits, DType dtype) {
    int const mantissa_bits = mantissa_bits_of(dtype), bias = bias_of(dtype);
    uint32_t const sign = (bits & 0x8000u) >> 8, magnitude = bits & 0x7fffu,
                   infinity = (2u * bias + 1) << mantissa_bits;
    if (magnitude > infinity) return sign | kNan;
    int const exponent = static_cast<int>(magnitude >> mantissa_bits) - bias;
    if (exponent < kLeastExponent - kMantissaBits - 1) return sign;  // below half of the smallest, subnormals included
    if (exponent > kGreatestExponent) return sign | kLargest;
    uint32_t const fraction = magnitude & ((1u << mantissa_bits) - 1);
    uint32_t rounded = 0;
    if (exponent >= kLeastExponent)
      rounded =
          round_off(static_cast<uint32_t>(exponent + kBias) << mantissa_bits | fraction, mantissa_bits - kMantissaBits);
    else  // in units of the smallest number
      rounded = round_off(1u << mantissa_bits | fraction, mantissa_bits - kMantissaBits + kLeastExponent - exponent);
    return sign | (rounded < kLargest ? rounded : kLargest);
  }

  CUTE_HOST_DEVICE static constexpr uint16_t decode(uint32_t stored, DType dtype) {
    int const mantissa_bits = mantissa_bits_of(dtype), bias = bias_of(dtype);
    uint32_t const sign = (stored & 0x80u) << 8, magnitude = stored & kNan;
    if (magnitude == 0) return static_cast<uint16_t>(sign);
    if (magnitude == kNan)  // a quiet one
      return static_cast<uint16_t>(sign | (2u * bias + 1) << mantissa_bits | 1u << (mantissa_bits - 1));
    int exponent = static_cast<int>(magnitude >> kMantissaBits) - kBias;
    uint32_t significand = magnitude & kFraction;
    if (magnitude >> kMantissaBits) {
      significand |= kFraction + 1;
    } else {
      exponent = kLeastExponent;
      for (; significand <= kFraction; --exponent) significand <<= 1;
    }
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent + bias) << mantissa_bits |
                                 (significand & kFraction) << (mantissa_bits - kMantissaBits));
  }

  CUTE_HOST_DEVICE static constexpr bool is_zero(uint32_t stored) { return (stored & kNan) == 0; }
  CUTE_HOST_DEVICE static constexpr bool all_finite(uint32_t word) {
    for (; word; word >>= kValueBits)
      if ((word & kNan) == kNan) return false;
    return true;
  }

 private:
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr int kLeastExponent = 1 - kBias, kGreatestExponent = 8;
  static constexpr uint32_t kFraction = (1u << kMantissaBits) - 1;
  static constexpr uint32_t kNan = 0x7f, kLargest = 0x7e;

  CUTE_HOST_DEVICE static constexpr int mantissa_bits_of(DType dtype) { return dtype == DType::kFloat16 ? 10 : 7; }
  CUTE_HOST_DEVICE static constexpr int bias_of(DType dtype) { return dtype == DType::kFloat16 ? 15 : 127; }

  // x without its `bits` lowest bits, to nearest even; bits > 0.
  CUTE_HOST_DEVICE static constexpr uint32_t round_off(uint32_t x, int bits) {
    return (x + (1u << (bits - 1)) - 1 + (x >> bits & 1)) >> bits;
  }
};

}  // namespace cute_kernels::format
