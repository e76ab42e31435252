// The rows of p that belong to a tile of values.
#pragma once

#include "cute_kernels/matmul/stage.hpp"
#include "cute_kernels/matmul/tile_scheduler.hpp"

namespace cute_kernels::matmul {

template <int N>
struct DenseTile {
  Params const& params;
  Segment segment;
  int64_t first_token;
  int tokens;  // that exist

  CUTE_DEVICE DenseTile(Params const& params, int tile)
      : params(params), segment(segment_at<N>(params.work, params.work.tiles_per_segment.div(tile))),
        first_token(int64_t{tile - segment.tiles.begin} * format::kTileTokens),
        tokens(static_cast<int>(cute::min(int64_t{format::kTileTokens}, params.sparse.tokens - first_token))) {}

  CUTE_DEVICE uint8_t const* row(int index) const {
    int64_t offset = dense_row_offset(params.dense, params.work, segment.head, segment.first_row + index) + first_token;
    return static_cast<uint8_t const*>(params.dense.data) + offset * dtype_bytes(params.dense.dtype);
  }

  // With all lanes, through registers: for rows that no bulk or vector copy can take. Tokens beyond the last are zeros.
  CUTE_DEVICE void copy_rows(uint8_t* to) const {
    visit_dtype(params.dense.dtype, [&](auto type) {
      using P = decltype(type);
      CUTE_NO_UNROLL
      for (int i = 0; i < segment.rows; ++i) {
        auto const* from = reinterpret_cast<P const*>(row(i));
        CUTE_UNROLL
        for (int token = threadIdx.x % 32; token < format::kTileTokens; token += 32)
          reinterpret_cast<P*>(to + i * dense_row_bytes(params.dense.dtype))[token] = token < tokens ? from[token] : P(0.f);
      }
    });
  }
};

}  // namespace cute_kernels::matmul
