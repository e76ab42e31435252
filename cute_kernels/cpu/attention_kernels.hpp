// The kernels that attention needs beside the products, for any simd type: a row's softmax, and tiles of dense tokens.
#pragma once

#include <cstdint>
#include <cstring>

#include "cute_kernels/cpu/half.hpp"
#include "cute_kernels/cpu/kernels.hpp"
#include "cute_kernels/cpu/tile_shape.hpp"

namespace cute_kernels::cpu {
namespace {

constexpr float kInfinity = __builtin_inff();

// e^x for x <= 0 with a relative error below 3e-7; 0 below the normal numbers, NaN for NaN. No branches: the
// compiler makes vectors of loops over it.
inline float exp_of_negative(float x) {
  constexpr float kLog2E = 1.44269504f, kRound = 12582912.f;  // adding 1.5 * 2^23 leaves an integer in the low bits
  constexpr float kSmallest = -87.f;
  float const clamped = x < kSmallest ? kSmallest : x;
  float const shifted = clamped * kLog2E + kRound;
  float const n = shifted - kRound;
  // e^x = 2^n e^r with r = x - n ln 2, ln 2 in two parts: the product with the first is exact.
  float const r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  float const power = float_of_bits((bits_of_float(shifted) - 0x4b400000u + 127u) << 23);
  return x < kSmallest ? 0.f : p * power;
}

template <class Simd>
float softmax(float* logits, int visible, RunningSoftmax* running) {
  constexpr int W = 16;  // partial sums, for any width of vectors: the same order of additions
  for (int i = visible; i < kTokensOfTile; ++i) logits[i] = -kInfinity;
  typename Simd::Float most = Simd::broadcast(running->row_max);
  for (int i = 0; i < kTokensOfTile; i += Simd::kWidth) most = Simd::max(Simd::load(logits + i), most);
  float part[W];
  Simd::store(part, most);
  float max = part[0];
  for (int i = 1; i < Simd::kWidth; ++i) max = part[i] > max ? part[i] : max;

  float const finite_max = max == -kInfinity ? 0.f : max;  // -inf: all logits so far are -inf or NaN
  for (int i = 0; i < kTokensOfTile; ++i) logits[i] = exp_of_negative(logits[i] - finite_max);
  for (int i = 0; i < W; ++i) part[i] = (logits[i] + logits[i + W]) + (logits[i + 2 * W] + logits[i + 3 * W]);
#pragma GCC unroll 4
  for (int width = W / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  float const factor = max == running->row_max ? 1.f : exp_of_negative(running->row_max - finite_max);
  *running = {max, running->row_sum * factor + part[0]};
  return factor;
}

template <class Simd>
void widen(uint16_t const* in, int head_dim, int padded_head_dim, bool bfloat16, float* out) {
  alignas(64) uint16_t row[256] = {};
  std::memcpy(row, in, head_dim * sizeof *in);
  for (int i = 0; i < padded_head_dim; i += Simd::kWidth)
    Simd::store(out + i, bfloat16 ? Simd::template widen<true>(row + i) : Simd::template widen<false>(row + i));
}

// N rows of q, 4 tokens at a time.
template <class Simd, int N>
void dense_logits_of(DenseTile const& keys, float const* q, float scale, float* logits) {
  using Float = typename Simd::Float;
  int const size = keys.padded_head_dim;
  for (int token = 0; token < keys.tokens; token += 4) {
    Float sum[N][4];
    for (auto& row : sum)
      for (Float& s : row) s = Simd::zero();
    for (int i = 0; i < size; i += Simd::kWidth) {
      Float k[4];
      for (int j = 0; j < 4; ++j) k[j] = Simd::load(keys.rows + (token + j) * size + i);
      for (int n = 0; n < N; ++n) {
        Float x = Simd::load(q + n * size + i);
        for (int j = 0; j < 4; ++j) sum[n][j] = Simd::multiply_add(k[j], x, sum[n][j]);
      }
    }
    for (int n = 0; n < N; ++n) {
      float folded[8];
      Simd::fold(sum[n], folded);
      for (int j = 0; j < 4; ++j) logits[n * kTokensOfTile + token + j] = scale * (folded[2 * j] + folded[2 * j + 1]);
    }
  }
}

template <class Simd>
void dense_logits(DenseTile const& keys, float const* q, int rows, float scale, float* logits) {
  for_row_blocks<kMaxRows>(rows, [&](int row, auto n) {
    dense_logits_of<Simd, decltype(n)::value>(keys, q + row * keys.padded_head_dim, scale,
                                              logits + row * kTokensOfTile);
  });
}

// N rows over the tokens [first, last).
template <class Simd, int N>
void dense_values_of(DenseTile const& values, float const* weights, int first, int last, float* sums) {
  using Float = typename Simd::Float;
  constexpr int kFit = Simd::kAccumulators / N, C = kFit < 1 ? 1 : kFit > 4 ? 4 : kFit;  // vectors of channels
  int const size = values.padded_head_dim;
  for (int i = 0; i < size; i += C * Simd::kWidth) {
    Float sum[N][C];
    for (int n = 0; n < N; ++n)
      for (int c = 0; c < C; ++c) sum[n][c] = Simd::load(sums + n * size + i + c * Simd::kWidth);
    for (int token = first; token < last; ++token) {
      Float v[C];
      for (int c = 0; c < C; ++c) v[c] = Simd::load(values.rows + token * size + i + c * Simd::kWidth);
      for (int n = 0; n < N; ++n) {
        Float p = Simd::broadcast(weights[n * kTokensOfTile + token]);
        for (int c = 0; c < C; ++c) sum[n][c] = Simd::multiply_add(v[c], p, sum[n][c]);
      }
    }
    for (int n = 0; n < N; ++n)
      for (int c = 0; c < C; ++c) Simd::store(sums + n * size + i + c * Simd::kWidth, sum[n][c]);
  }
}

// Tokens that a row does not see are left out rather than multiplied by a weight of 0: they may be NaN.
template <class Simd>
void dense_values(DenseTile const& values, float const* weights, int const* visible, int rows, float* sums) {
  int const size = values.padded_head_dim;
  for_row_blocks<kMaxRows>(rows, [&](int row, auto n) {
    constexpr int N = decltype(n)::value;
    int shared = visible[row];  // by all N
    for (int i = row + 1; i < row + N; ++i) shared = visible[i] < shared ? visible[i] : shared;
    dense_values_of<Simd, N>(values, weights + row * kTokensOfTile, 0, shared, sums + row * size);
    for (int i = row; i < row + N; ++i)
      dense_values_of<Simd, 1>(values, weights + i * kTokensOfTile, shared, visible[i], sums + i * size);
  });
}

}  // namespace
}  // namespace cute_kernels::cpu
