// Writes a tile's logits: from accumulators through shared memory, where they are put back in token order, to rows.
#pragma once

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/mma/warp/traits.hpp"
#include "cute_kernels/ops/product/stage.hpp"
#include "cute_kernels/ops/qk/params.hpp"

namespace cute_kernels::qk {

using namespace cute;
using product::Stage;

// In shared memory logits lie as (group of rows, token, row of the group): an accumulator's two neighbouring rows are
// written together, and a lane reads all four rows of its tokens as 16 bytes. In the type of the output for N 8; in
// float for N 16, where choosing a type with all accumulators alive spills.
inline constexpr int kGroupRows = 4;

template <class T>
using GroupRows = cutlass::AlignedArray<T, kGroupRows>;  // of one token

// The bytes that they take in a tile's stage.
template <class Traits>
CUTE_HOST_DEVICE constexpr int logits_bytes() {
  return Traits::kN * format::kTileTokens * static_cast<int>(sizeof(float));
}

// With all lanes, when all have read the block.
template <class Traits, class T, class Fragment>
CUTE_DEVICE void store_in_token_order(float scale, int rows, Stage stage,
                                      Fragment const& tCrC /* (MMA,MMA_M,MMA_N) */) {
  auto thr_mma = typename Traits::TiledMma{}.get_slice(threadIdx.x % 32);
  Tensor cC =
      make_identity_tensor(Shape<Int<Traits::kM>, Int<Traits::kN>>{});  // (BLK_M,BLK_N) -> (token_position, row)
  Tensor tCcC = thr_mma.partition_C(cC);                                // ((2,2),MMA_M,MMA_N)
  CUTE_STATIC_ASSERT_V(shape(tCcC) == shape(tCrC));
  CUTE_STATIC_ASSERT_V(
      (shape<0>(tCcC) == Shape<_2, _2>{}));  // two neighbouring rows of query, then 8 positions further on
  int token[size<1>(tCcC)][2];  // all before the first store, which might overwrite them as far as compilers know
  CUTE_UNROLL
  for (int m = 0; m < size<1>(tCcC); ++m) {
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) token[m][j] = stage.token_order[get<0>(tCcC(make_coord(0, j), m, 0))];
  }
  using Pair = cutlass::AlignedArray<T, 2>;
  CUTE_UNROLL
  for (int n = 0; n < size<2>(tCcC); ++n) {
    int row = get<1>(tCcC(make_coord(0, 0), 0, n));
    if (row >= rows) continue;
    auto* group = reinterpret_cast<GroupRows<T>*>(stage.block) + row / kGroupRows * format::kTileTokens;
    auto* pairs = reinterpret_cast<Pair*>(group) + row % kGroupRows / 2;
    CUTE_UNROLL
    for (int m = 0; m < size<1>(tCcC); ++m) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        Pair pair;
        pair[0] = T(tCrC(make_coord(0, j), m, n) * scale), pair[1] = T(tCrC(make_coord(1, j), m, n) * scale);
        pairs[token[m][j] * (kGroupRows / 2)] = pair;
      }
    }
  }
}

// With all lanes, when all have stored theirs in token order. out: the tile's first token of the first row.
template <class T, class Out>
CUTE_DEVICE void store_rows(Out* out, int rows, int64_t row_stride, int tokens, bool vector_stores, Stage stage) {
  constexpr int kTokens = 4 / sizeof(T);  // of a lane at a time
  using Word = cutlass::AlignedArray<Out, kTokens>;
  int lane_token = threadIdx.x % 32 * kTokens;
  auto const* logits = reinterpret_cast<GroupRows<T> const*>(stage.block) + lane_token;
  out += lane_token, tokens -= lane_token;
  CUTE_NO_UNROLL
  for (; rows > 0; rows -= kGroupRows, logits += format::kTileTokens) {
    alignas(16) GroupRows<T> values[format::kTileTokens / 32];
    CUTE_UNROLL
    for (int i = 0; i < format::kTileTokens; i += 32 * kTokens)
      *reinterpret_cast<uint4*>(values + i / 32) = *reinterpret_cast<uint4 const*>(logits + i);
    CUTE_UNROLL
    for (int row = 0; row < kGroupRows; ++row, out += row_stride) {
      if (row >= rows) return;
      CUTE_UNROLL
      for (int i = 0; i < format::kTileTokens; i += 32 * kTokens) {
        Word word;
        CUTE_UNROLL
        for (int t = 0; t < kTokens; ++t) word[t] = Out(values[i / 32 + t][row]);
        if (vector_stores) {
          if (i < tokens) *reinterpret_cast<Word*>(out + i) = word;
        } else {
          CUTE_UNROLL
          for (int t = 0; t < kTokens; ++t)
            if (i + t < tokens) out[i + t] = word[t];
        }
      }
    }
  }
}

template <class Traits, class Fragment>
CUTE_DEVICE void store_logits(Params const& params, schedule::WorkTile const& work_tile, int tile, Stage stage,
                              Fragment const& tCrC /* (MMA,MMA_M,MMA_N) */) {
  int64_t tokens = params.sparse.tokens, first_token = int64_t{tile - work_tile.tiles.begin} * format::kTileTokens;
  int valid = static_cast<int>(min(int64_t{format::kTileTokens}, tokens - first_token));
  int64_t out = (params.head(work_tile) * params.schedule.rows + work_tile.first_row) * tokens + first_token;
  auto store = [&](auto staged, auto type) {
    using Out = decltype(type);
    store_rows<decltype(staged)>(static_cast<Out*>(params.out) + out, work_tile.rows, tokens, valid,
                                 params.vector_stores, stage);
  };
  if constexpr (Traits::kN == 8) {
    visit_dtype(params.out_dtype, [&](auto type) {
      store_in_token_order<Traits, decltype(type)>(params.scale, work_tile.rows, stage, tCrC);
      __syncwarp();
      store(type, type);
    });
  } else {
    store_in_token_order<Traits, float>(params.scale, work_tile.rows, stage, tCrC);
    __syncwarp();
    visit_dtype(params.out_dtype, [&](auto type) { store(0.f, type); });
  }
}

}  // namespace cute_kernels::qk
