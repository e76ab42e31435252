// Vectors as plain arrays: every CPU, and the pattern for the other simd types.
#pragma once

#include <cstdint>
#include <cstring>

#include "cute_kernels/cpu/half.hpp"

namespace cute_kernels::cpu {
namespace {

struct Scalar {
  static constexpr char const* kName = "scalar";
  static constexpr int kWidth = 8;
  static constexpr int kAccumulators = 4;  // vectors that may be summed into at a time without spills
  struct Float {
    float at[kWidth];
  };
  struct Words {
    uint32_t at[kWidth];
  };

  static Float zero() { return {}; }
  static Float broadcast(float value) {
    Float v;
    for (float& x : v.at) x = value;
    return v;
  }
  static Float load(float const* p) {
    Float v;
    std::memcpy(v.at, p, sizeof v.at);
    return v;
  }
  static void store(float* p, Float v) { std::memcpy(p, v.at, sizeof v.at); }
  // A vector that folds to these 8, entry i of the vector to i % 8.
  static Float load8(float const* p) { return load(p); }
  static void store8(float* p, Float v) { store(p, v); }
  static Float multiply_add(Float a, Float b, Float c) {
    for (int i = 0; i < kWidth; ++i) c.at[i] += a.at[i] * b.at[i];
    return c;
  }
  // a where it is greater, else b: b where a is NaN.
  static Float max(Float a, Float b) {
    for (int i = 0; i < kWidth; ++i) b.at[i] = a.at[i] > b.at[i] ? a.at[i] : b.at[i];
    return b;
  }
  // The next of p wherever the mask has a bit, 0 elsewhere.
  static Float expand(float const* p, uint32_t mask) {
    Float v;
    for (int i = 0; i < kWidth; ++i) {
      uint32_t bit = (mask >> i) & 1;
      v.at[i] = float_of_bits(bits_of_float(*p) & (0u - bit));
      p += bit;
    }
    return v;
  }
  static int count(uint32_t mask) {
#if defined(__GNUC__)
    return __builtin_popcount(mask);
#else
    int n = 0;
    for (; mask; mask &= mask - 1) ++n;
    return n;
#endif
  }
  // out[2 i], out[2 i + 1]: the sums of the even and of the odd pairs of entries of v[i].
  static void fold(Float const (&v)[4], float* out) {
    for (int i = 0; i < 4; ++i)
      for (int odd = 0; odd < 2; ++odd)
        out[2 * i + odd] = (v[i].at[2 * odd] + v[i].at[2 * odd + 4]) + (v[i].at[2 * odd + 1] + v[i].at[2 * odd + 5]);
  }

  static Words load_words(uint32_t const* p) {
    Words v;
    std::memcpy(v.at, p, sizeof v.at);
    return v;
  }
  static Words zero_words() { return {}; }
  static void transpose(Words (&rows)[kWidth]) {
    for (int i = 0; i < kWidth; ++i)
      for (int j = 0; j < i; ++j) {
        uint32_t w = rows[i].at[j];
        rows[i].at[j] = rows[j].at[i];
        rows[j].at[i] = w;
      }
  }
  // The low or high halves of words as floats.
  template <bool kBFloat16>
  static Float low(Words words) {
    Float v;
    for (int i = 0; i < kWidth; ++i) {
      uint16_t bits = static_cast<uint16_t>(words.at[i]);
      v.at[i] = kBFloat16 ? bfloat16_to_float(bits) : half_to_float(bits);
    }
    return v;
  }
  template <bool kBFloat16>
  static Float high(Words words) {
    for (int i = 0; i < kWidth; ++i) words.at[i] >>= 16;
    return low<kBFloat16>(words);
  }

  template <bool kBFloat16>
  static Float widen(uint16_t const* p) {
    Float v;
    for (int i = 0; i < kWidth; ++i) v.at[i] = kBFloat16 ? bfloat16_to_float(p[i]) : half_to_float(p[i]);
    return v;
  }
  template <bool kBFloat16>
  static void narrow(Float v, uint16_t* p) {
    for (int i = 0; i < kWidth; ++i) p[i] = kBFloat16 ? float_to_bfloat16(v.at[i]) : float_to_half(v.at[i]);
  }
  static Float scale(Float v, float factor) {
    for (float& x : v.at) x *= factor;
    return v;
  }
  // out[i] = in[index[i]], 64 of each.
  static void permute64(float const* in, uint8_t const* index, float* out) {
    for (int i = 0; i < 64; ++i) out[i] = in[index[i]];
  }

  // Bit i: keys[i] >= threshold; 32 keys below 2^15.
  static uint32_t at_least(uint16_t const* keys, uint16_t threshold) {
    uint32_t mask = 0;
    for (int i = 0; i < 32; ++i) mask |= static_cast<uint32_t>(keys[i] >= threshold) << i;
    return mask;
  }
};

}  // namespace
}  // namespace cute_kernels::cpu
