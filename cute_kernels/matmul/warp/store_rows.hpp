// Writes a tile's logits from shared memory, where they are in the order of tokens already.
#pragma once

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/matmul/tile_scheduler.hpp"

namespace cute_kernels::matmul {

// A row of logits in shared memory: 64 tokens and 4 more, so that the query rows of a store fall in different banks.
inline constexpr int kLogitsStride = format::kTileTokens + 4;
inline constexpr int kStoreTokens = 4;  // at a time
inline constexpr int kStoreLanes = 8;   // of a row, each twice

// With all lanes of a warp.
CUTE_DEVICE void store_rows(Params const& params, Segment const& segment, int tile, float const* logits) {
  int lane = threadIdx.x % kStoreLanes;
  int64_t tokens = params.sparse.tokens, tile_token = int64_t{tile - segment.tiles.begin} * format::kTileTokens;
  int valid = static_cast<int>(min(int64_t{format::kTileTokens}, tokens - tile_token));
  int64_t out = (int64_t{segment.head} * params.work.rows + segment.first_row) * tokens + tile_token;
  visit_dtype(params.out_dtype, [&](auto type) {
    using Out = decltype(type);
    struct alignas(kStoreTokens * sizeof(Out)) Vector {
      Out values[kStoreTokens];
    };
    CUTE_NO_UNROLL
    for (int row = threadIdx.x % 32 / kStoreLanes; row < segment.rows; row += 32 / kStoreLanes) {
      auto* to = static_cast<Out*>(params.out) + out + row * tokens;
      CUTE_UNROLL
      for (int token = kStoreTokens * lane; token < format::kTileTokens; token += kStoreTokens * kStoreLanes) {
        float4 x = *reinterpret_cast<float4 const*>(logits + row * kLogitsStride + token);
        Vector v{{Out(x.x * params.scale), Out(x.y * params.scale), Out(x.z * params.scale), Out(x.w * params.scale)}};
        if (params.vectorized) {
          if (token < valid) *reinterpret_cast<Vector*>(to + token) = v;
        } else {
          CUTE_UNROLL
          for (int i = 0; i < kStoreTokens; ++i)
            if (token + i < valid) to[token + i] = v.values[i];
        }
      }
    }
  });
}

}  // namespace cute_kernels::matmul
