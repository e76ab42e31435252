// The kernels over one tile, for any simd type; included by one source file for each instruction set.
#pragma once

#include <cstdint>

#include "cute_kernels/cpu/kernels.hpp"
#include "cute_kernels/cpu/operand_rows.hpp"
#include "cute_kernels/cpu/select_row.hpp"
#include "cute_kernels/cpu/tile_shape.hpp"

namespace cute_kernels::cpu {
namespace {

template <class Simd, bool kBFloat16>
void unpack_values(const uint32_t* values, int rows, const UnpackedTile& tile) {
  constexpr int W = Simd::kWidth;
  for (int lane0 = 0; lane0 < kTileLanes; lane0 += W)
    for (int row0 = 0; row0 < rows; row0 += W) {
      typename Simd::Words words[W];  // row row0 + i of W lanes, then lane lane0 + i of W rows
      const uint32_t* block = values + row0 * kTileLanes + lane0;
      if (row0 + W <= rows) {
        for (int i = 0; i < W; ++i) words[i] = Simd::load_words(block + i * kTileLanes);
      } else {
        for (int i = 0; i < W; ++i)
          words[i] = row0 + i < rows ? Simd::load_words(block + i * kTileLanes) : Simd::zero_words();
      }
      Simd::transpose(words);
      for (int i = 0; i < W; ++i) {
        float* stream = tile.streams + (lane0 + i) * kTileStreams * tile.stride + row0;
        Simd::store(stream, Simd::template low<kBFloat16>(words[i]));
        Simd::store(stream + tile.stride, Simd::template high<kBFloat16>(words[i]));
      }
    }
}

template <class Simd>
void unpack(const uint32_t* block, int bitmap_rows, int value_rows, bool bfloat16, const UnpackedTile& tile) {
  const int words = bitmap_rows * kTileLanes;
  for (int row = 0; row < bitmap_rows; ++row) {
    uint16_t* masks = tile.masks + row * kTileStreams * kTileLanes;
    for (int lane = 0; lane < kTileLanes; ++lane) {
      uint32_t bits = shuffle_bits(block[row * kTileLanes + lane]);
      masks[lane] = static_cast<uint16_t>(bits);
      masks[kTileLanes + lane] = static_cast<uint16_t>(bits >> 16);
    }
  }
  if (bfloat16) unpack_values<Simd, true>(block + words, value_rows, tile);
  else unpack_values<Simd, false>(block + words, value_rows, tile);
}

// Calls f(vector index, vector) for the entries that one bitmap word covers and moves `next` behind them.
template <class Simd, class F>
inline void expand_word(const float*& next, uint32_t mask, F&& f) {
  constexpr int W = Simd::kWidth;
  for (int part = 0; part < kMaskEntries / W; ++part) {
    uint32_t bits = (mask >> (part * W)) & ((1u << W) - 1);
    f(part, Simd::expand(next, bits));
    next += Simd::count(bits);
  }
}

// N rows of the panel, C blocks of tokens at a time.
template <class Simd, int HeadDim, int N, int C>
void multiply_keys(const UnpackedTile& tile, const float* panel, float* sums) {
  using Float = typename Simd::Float;
  constexpr int kEntries = HeadDim / 4, kWords = kEntries / kMaskEntries, kParts = kMaskEntries / Simd::kWidth;
  constexpr int kPanel = kTileColumns * kTileStreams * kEntries, kSums = kTileRows * kTileBlocks * 2;
  static_assert(kTileBlocks % C == 0);
  for (int row = 0; row < kTileRows; ++row) {
    [[maybe_unused]] int done[kTileColumns][kTileStreams] = {};  // entries used by the blocks before c0
    for (int c0 = 0; c0 < kTileBlocks; c0 += C) {
      Float sum[N * C];
      for (Float& v : sum) v = Simd::zero();
      for (int column = 0; column < kTileColumns; ++column) {
        for (int s = 0; s < kTileStreams; ++s) {
          const uint16_t* masks =
              tile.masks + (c0 * kWords * kTileStreams + s) * kTileLanes + row * kTileColumns + column;
          const float* start = tile.streams + ((row * kTileColumns + column) * kTileStreams + s) * tile.stride;
          const float* values = start;
          if constexpr (C < kTileBlocks) values += done[column][s];
          const float* q = panel + (column * kTileStreams + s) * kEntries;
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
            for (int w = 0; w < kWords; ++w)
              expand_word<Simd>(values, masks[(c * kWords + w) * kTileStreams * kTileLanes], [&](int part, Float v) {
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                  Float qv = Simd::load(q + n * kPanel + (w * kParts + part) * Simd::kWidth);
                  sum[n * C + c] = Simd::multiply_add(v, qv, sum[n * C + c]);
                }
              });
          if constexpr (C < kTileBlocks) done[column][s] = static_cast<int>(values - start);
        }
      }
      for (int i = 0; i < N * C; i += 4) {
        Float four[4];
        for (int j = 0; j < 4; ++j) four[j] = i + j < N * C ? sum[i + j] : Simd::zero();
        float folded[8];
        Simd::fold(four, folded);
        for (int j = 0; j < 4 && i + j < N * C; ++j) {
          int n = (i + j) / C, c = c0 + (i + j) % C;
          float* out = sums + n * kSums + (row * kTileBlocks + c) * 2;
          out[0] = folded[2 * j], out[1] = folded[2 * j + 1];
        }
      }
    }
  }
}

template <class Simd, int HeadDim, int N>
void multiply_values(const UnpackedTile& tile, const float* patterns, float* sums) {
  using Float = typename Simd::Float;
  constexpr int kEntries = HeadDim / 4, kWords = kEntries / kMaskEntries, kParts = kMaskEntries / Simd::kWidth;
  constexpr int kVectors = kWords * kParts, kPatterns = kTileBlocks * kTileColumns * kTileStreams * 4;
  constexpr int kSums = kTileRows * kEntries;
  for (int row = 0; row < kTileRows; ++row) {
    Float sum[N][kVectors];
    for (int n = 0; n < N; ++n)
      for (int i = 0; i < kVectors; ++i) sum[n][i] = Simd::load(sums + n * kSums + row * kEntries + i * Simd::kWidth);
    for (int column = 0; column < kTileColumns; ++column) {
      const int lane = row * kTileColumns + column;
      const float* values[kTileStreams];
      for (int s = 0; s < kTileStreams; ++s) values[s] = tile.streams + (lane * kTileStreams + s) * tile.stride;
      for (int c = 0; c < kTileBlocks; ++c)
#pragma GCC unroll 2
        for (int s = 0; s < kTileStreams; ++s) {
          Float p[N];
          for (int n = 0; n < N; ++n)
            p[n] = Simd::repeat4(patterns + n * kPatterns + ((c * kTileColumns + column) * kTileStreams + s) * 4);
#pragma GCC unroll 4
          for (int w = 0; w < kWords; ++w)
            expand_word<Simd>(values[s], tile.masks[((c * kWords + w) * kTileStreams + s) * kTileLanes + lane],
                              [&](int part, Float v) {
#pragma GCC unroll 4
                                for (int n = 0; n < N; ++n)
                                  sum[n][w * kParts + part] = Simd::multiply_add(v, p[n], sum[n][w * kParts + part]);
                              });
        }
    }
    for (int n = 0; n < N; ++n)
      for (int i = 0; i < kVectors; ++i) Simd::store(sums + n * kSums + row * kEntries + i * Simd::kWidth, sum[n][i]);
  }
}

template <class Simd, int HeadDim>
void multiply_keys_rows(const UnpackedTile& tile, const float* panel, int rows, float* sums) {
  constexpr int kPanel = kTileColumns * kTileStreams * HeadDim / 4, kSums = kTileRows * kTileBlocks * 2;
  for_row_blocks<kMaxRows>(rows, [&](int row, auto n) {
    constexpr int N = decltype(n)::value, kFit = Simd::kAccumulators / N;
    multiply_keys<Simd, HeadDim, N,
                  (kFit < 1             ? 1
                   : kFit > kTileBlocks ? kTileBlocks
                                        : kFit)>(tile, panel + row * kPanel, sums + row * kSums);
  });
}

template <class Simd, int HeadDim>
void multiply_values_rows(const UnpackedTile& tile, const float* patterns, int rows, float* sums) {
  constexpr int kPatterns = kTileBlocks * kTileColumns * kTileStreams * 4, kSums = kTileRows * HeadDim / 4;
  constexpr int kFit = Simd::kAccumulators / (HeadDim / 4 / Simd::kWidth);
  for_row_blocks<(kFit < 1 ? 1 : kFit > kMaxRows ? kMaxRows : kFit)>(rows, [&](int row, auto n) {
    multiply_values<Simd, HeadDim, decltype(n)::value>(tile, patterns + row * kPatterns, sums + row * kSums);
  });
}

template <class Simd>
void multiply_keys_any(const UnpackedTile& tile, int head_dim, const float* panel, int rows, float* sums) {
  auto f = head_dim == 64 ? multiply_keys_rows<Simd, 64>
                          : head_dim == 128 ? multiply_keys_rows<Simd, 128> : multiply_keys_rows<Simd, 256>;
  f(tile, panel, rows, sums);
}

template <class Simd>
void multiply_values_any(const UnpackedTile& tile, int head_dim, const float* patterns, int rows, float* sums) {
  auto f = head_dim == 64 ? multiply_values_rows<Simd, 64>
                          : head_dim == 128 ? multiply_values_rows<Simd, 128> : multiply_values_rows<Simd, 256>;
  f(tile, patterns, rows, sums);
}

template <class Simd>
constexpr Kernels make_kernels() {
  return {Simd::kName,         unpack<Simd>,           multiply_keys_any<Simd>, store_logits<Simd>, make_patterns<Simd>,
          multiply_values_any<Simd>, select_row<Simd>, nullptr};
}

}  // namespace
}  // namespace cute_kernels::cpu
