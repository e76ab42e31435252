// One row of a tile's logits on its way out, and of p on its way in, for any simd type.
#pragma once

#include <cstdint>
#include <cstring>

#include "cute_kernels/cpu/kernels.hpp"

namespace cute_kernels::cpu {
namespace {

template <class T>
void copy_tokens(T* to, void const* from, int valid) {
  if (valid == kTokensOfTile)
    std::memcpy(to, from, kTokensOfTile * sizeof(T));  // the usual case, without a call
  else
    std::memcpy(to, from, valid * sizeof(T));
}

template <class Simd>
void store_logits(float const* sums, uint8_t const* sum_of_token, float scale, int valid, Number dtype, void* out) {
  alignas(64) float logits[kTokensOfTile];
  Simd::permute64(sums, sum_of_token, logits);
  for (int i = 0; i < kTokensOfTile; i += Simd::kWidth)
    Simd::store(logits + i, Simd::scale(Simd::load(logits + i), scale));
  if (dtype == Number::kFloat32) {
    copy_tokens(static_cast<float*>(out), logits, valid);
    return;
  }
  alignas(64) uint16_t narrow[kTokensOfTile];
  for (int i = 0; i < kTokensOfTile; i += Simd::kWidth) {
    if (dtype == Number::kBFloat16)
      Simd::template narrow<true>(Simd::load(logits + i), narrow + i);
    else
      Simd::template narrow<false>(Simd::load(logits + i), narrow + i);
  }
  copy_tokens(static_cast<uint16_t*>(out), narrow, valid);
}

// One row of p as floats by token.
template <class Simd>
void widen_weights(WeightRow const& p, float* by_token) {
  if (p.dtype == Number::kFloat32) {
    std::memset(by_token, 0, kTokensOfTile * sizeof *by_token);
    copy_tokens(by_token, p.data, p.valid);
  } else {
    alignas(64) uint16_t narrow[kTokensOfTile] = {};
    copy_tokens(narrow, p.data, p.valid);
    for (int i = 0; i < kTokensOfTile; i += Simd::kWidth)
      Simd::store(by_token + i, p.dtype == Number::kBFloat16 ? Simd::template widen<true>(narrow + i)
                                                             : Simd::template widen<false>(narrow + i));
  }
}

template <class Simd>
void make_weights(WeightRow const& p, uint8_t const* position, float* panel) {
  alignas(64) float by_token[kTokensOfTile], weights[kTokensOfTile];
  widen_weights<Simd>(p, by_token);
  Simd::permute64(by_token, p.token_order, weights);
  Simd::permute64(weights, position, panel);  // every weight twice
  Simd::permute64(weights, position + kTokensOfTile, panel + kTokensOfTile);
}

}  // namespace
}  // namespace cute_kernels::cpu
