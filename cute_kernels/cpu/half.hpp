// fp16 and bf16 to and from fp32, in plain C++; every NaN stays a NaN, subnormals are exact, rounding is to nearest
// even.
#pragma once

#include <cstdint>
#include <cstring>

namespace cute_kernels::cpu {
namespace {  // one copy a translation unit: these are compiled for several instruction sets

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bfloat16_to_float(uint16_t bits) { return float_of_bits(uint32_t{bits} << 16); }

inline uint16_t float_to_bfloat16(float value) {
  uint32_t bits = bits_of_float(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}

inline float half_to_float(uint16_t bits) {
  uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  uint32_t magnitude = bits & 0x7fffu;
  uint32_t normal = (magnitude << 13) + ((127 - 15) << 23);
  uint32_t special = (magnitude << 13) + ((255 - 31) << 23);
  uint32_t subnormal = bits_of_float(static_cast<float>(magnitude) * 0x1p-24f);
  uint32_t value = magnitude >= 0x7c00u ? special : magnitude < 0x0400u ? subnormal : normal;
  return float_of_bits(sign | value);
}

inline uint16_t float_to_half(float value) {
  uint32_t bits = bits_of_float(value);
  uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x47800000u) {  // 2^16 and above; values that round up to it carry into the exponent below
    result = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14: normal
    result = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  } else {  // adding 0.5 leaves multiples of 2^-24 in the low bits, rounded to nearest even
    result = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  }
  return static_cast<uint16_t>(sign | result);
}

}  // namespace
}  // namespace cute_kernels::cpu
