// The kernels over one tile, for any simd type; included by one source file for each instruction set.
#pragma once

#include <cstdint>

#include "cute_kernels/cpu/attention_kernels.hpp"
#include "cute_kernels/cpu/kernels.hpp"
#include "cute_kernels/cpu/operand_rows.hpp"
#include "cute_kernels/cpu/select_row.hpp"
#include "cute_kernels/cpu/tile_shape.hpp"

namespace cute_kernels::cpu {
namespace {

template <class Simd, bool kBFloat16>
void unpack_values(uint32_t const* values, int rows, UnpackedTile const& tile) {
  constexpr int W = Simd::kWidth;
  for (int lane0 = 0; lane0 < kTileLanes; lane0 += W)
    for (int row0 = 0; row0 < rows; row0 += W) {
      typename Simd::Words words[W];  // row row0 + i of W lanes, then lane lane0 + i of W rows
      uint32_t const* block = values + row0 * kTileLanes + lane0;
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
void unpack(uint32_t const* block, int bitmap_rows, int value_rows, bool bfloat16, UnpackedTile const& tile) {
  int const words = bitmap_rows * kTileLanes;
  unpack_masks(block, bitmap_rows, tile.masks);
  if (bfloat16)
    unpack_values<Simd, true>(block + words, value_rows, tile);
  else
    unpack_values<Simd, false>(block + words, value_rows, tile);
}

// Calls f(vector index, vector) for the entries that one bitmap word covers and moves `next` behind them.
template <class Simd, class F>
inline void expand_word(float const*& next, uint32_t mask, F&& f) {
  constexpr int W = Simd::kWidth;
  for (int part = 0; part < kMaskEntries / W; ++part) {
    uint32_t bits = (mask >> (part * W)) & ((1u << W) - 1);
    f(part, Simd::expand(next, bits));
    next += Simd::count(bits);
  }
}

// A tile as the products see it: blocks of 16 rows of A, bitmap words of a block.
template <int HeadDim>
struct KeyShape {
  static constexpr bool kIsKey = true;
  static constexpr int kBlocks = kTileBlocks, kWords = HeadDim / (4 * kMaskEntries);
};
template <int HeadDim>
struct ValueShape {
  static constexpr bool kIsKey = false;
  static constexpr int kBlocks = HeadDim / 16, kWords = 1;
};

// Numbers of a query row in the panel and in the sums.
template <class Shape>
constexpr int panel_size() {
  return kTileColumns * kTileStreams * Shape::kWords * kMaskEntries;
}
template <class Shape>
constexpr int sums_size() {
  return kTileRows * Shape::kBlocks * (Shape::kIsKey ? 2 : kSumWidth);
}

// N rows of the panel, C blocks at a time. The sums of keys are complete after one tile and are stored folded; those
// of values are continued by the next tile, in kSumWidth parts.
template <class Simd, class Shape, int N, int C>
void multiply(UnpackedTile const& tile, float const* panel, float* sums) {
  using Float = typename Simd::Float;
  constexpr int kWords = Shape::kWords, kBlocks = Shape::kBlocks, kParts = kMaskEntries / Simd::kWidth;
  constexpr int kPanel = panel_size<Shape>(), kSums = sums_size<Shape>();
  static_assert(kBlocks % C == 0);
  for (int row = 0; row < kTileRows; ++row) {
    // The next value of each stream. The loops over streams are unrolled so that these pointers stay in registers.
    float const* next[kTileColumns * kTileStreams];
    next[0] = tile.streams + row * kTileColumns * kTileStreams * tile.stride;
#pragma GCC unroll 8
    for (int i = 1; i < kTileColumns * kTileStreams; ++i) next[i] = next[i - 1] + tile.stride;
#pragma GCC unroll 1
    for (int c0 = 0; c0 < kBlocks; c0 += C) {
      Float sum[N * C];
      [[maybe_unused]] auto at = [&](int i) {  // of values: where sum[i] is kept
        return sums + i / C * kSums + (row * kBlocks + c0 + i % C) * kSumWidth;
      };
      for (int i = 0; i < N * C; ++i) {
        if constexpr (Shape::kIsKey)
          sum[i] = Simd::zero();
        else
          sum[i] = Simd::load8(at(i));
      }
#pragma GCC unroll 4
      for (int column = 0; column < kTileColumns; ++column) {
#pragma GCC unroll 2
        for (int s = 0; s < kTileStreams; ++s) {
          uint16_t const* masks =
              tile.masks + (c0 * kWords * kTileStreams + s) * kTileLanes + row * kTileColumns + column;
          float const*& values = next[column * kTileStreams + s];
          float const* operand = panel + (column * kTileStreams + s) * kWords * kMaskEntries;
#pragma GCC unroll 16
          for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
            for (int w = 0; w < kWords; ++w)
              expand_word<Simd>(values, masks[(c * kWords + w) * kTileStreams * kTileLanes], [&](int part, Float v) {
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                  Float x = Simd::load(operand + n * kPanel + (w * kParts + part) * Simd::kWidth);
                  sum[n * C + c] = Simd::multiply_add(v, x, sum[n * C + c]);
                }
              });
        }
      }
      if constexpr (Shape::kIsKey) {
        for (int i = 0; i < N * C; i += 4) {
          Float four[4];
          for (int j = 0; j < 4; ++j) four[j] = i + j < N * C ? sum[i + j] : Simd::zero();
          float folded[8];
          Simd::fold(four, folded);
          for (int j = 0; j < 4 && i + j < N * C; ++j) {
            int n = (i + j) / C, c = c0 + (i + j) % C;
            float* out = sums + n * kSums + (row * kBlocks + c) * 2;
            out[0] = folded[2 * j], out[1] = folded[2 * j + 1];
          }
        }
      } else {
        for (int i = 0; i < N * C; ++i) Simd::store8(at(i), sum[i]);
      }
    }
  }
}

template <class Simd, class Shape>
void multiply_rows(UnpackedTile const& tile, float const* panel, int rows, float* sums) {
  for_row_blocks<kMaxRows>(rows, [&](int row, auto n) {
    constexpr int N = decltype(n)::value, kFit = Simd::kAccumulators / N;
    constexpr int C = kFit < 1 ? 1 : kFit > Shape::kBlocks ? Shape::kBlocks : kFit;
    multiply<Simd, Shape, N, C>(tile, panel + row * panel_size<Shape>(), sums + row * sums_size<Shape>());
  });
}

template <class Simd, template <int> class Shape>
void multiply_any(UnpackedTile const& tile, int head_dim, float const* panel, int rows, float* sums) {
  switch (head_dim) {
    case 64:
      return multiply_rows<Simd, Shape<64>>(tile, panel, rows, sums);
    case 128:
      return multiply_rows<Simd, Shape<128>>(tile, panel, rows, sums);
    case 256:
      return multiply_rows<Simd, Shape<256>>(tile, panel, rows, sums);
  }
  throw_head_dim(head_dim);
}

template <class Simd>
constexpr Kernels make_kernels() {
  Kernels kernels{};
  kernels.name = Simd::kName;
  kernels.unpack = unpack<Simd>;
  kernels.multiply_keys = multiply_any<Simd, KeyShape>;
  kernels.store_logits = store_logits<Simd>;
  kernels.make_weights = make_weights<Simd>;
  kernels.multiply_values = multiply_any<Simd, ValueShape>;
  kernels.select_row = select_row<Simd>;
  kernels.softmax = softmax<Simd>;
  kernels.widen = widen<Simd>;
  kernels.dense_logits = dense_logits<Simd>;
  kernels.dense_values = dense_values<Simd>;
  return kernels;
}

}  // namespace
}  // namespace cute_kernels::cpu
