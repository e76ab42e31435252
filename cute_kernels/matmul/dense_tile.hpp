// The rows of p that belong to a tile of values.
#pragma once

#include "cute_kernels/matmul/stage.hpp"
#include "cute_kernels/matmul/tile_scheduler.hpp"

namespace cute_kernels::matmul {

template <int N>
class DenseTile {
 public:
  CUTE_DEVICE explicit DenseTile(Params const& params) : params_(params) { segment_.tiles = {0, 0}; }

  CUTE_DEVICE void seek(int tile) {
    if (tile >= segment_.tiles.end) {  // tiles only go up
      segment_ = segment_at<N>(params_.work, params_.work.tiles_per_segment.div(tile));
      head_offset_ = dense_head_offset(params_.dense, params_.work, segment_.head);
    }
    first_token_ = int64_t{tile - segment_.tiles.begin} * format::kTileTokens;
  }

  CUTE_DEVICE int rows() const { return segment_.rows; }

  // Tokens that exist.
  CUTE_DEVICE int tokens() const {
    return static_cast<int>(cute::min(int64_t{format::kTileTokens}, params_.sparse.tokens - first_token_));
  }

  CUTE_DEVICE uint8_t const* row(int index) const {
    int64_t offset =
        head_offset_ + dense_row_offset(params_.dense, params_.work, segment_.first_row + index) + first_token_;
    return static_cast<uint8_t const*>(params_.dense.data) + offset * dtype_bytes(params_.dense.dtype);
  }

  // With all lanes, through registers: for rows that no bulk or vector copy can take. Tokens beyond the last are zeros.
  CUTE_DEVICE void copy_rows(uint8_t* to) const {
    int exist = tokens();
    visit_dtype(params_.dense.dtype, [&](auto type) {
      using P = decltype(type);
      CUTE_NO_UNROLL
      for (int i = 0; i < rows(); ++i) {
        auto const* from = reinterpret_cast<P const*>(row(i));
        CUTE_UNROLL
        for (int token = threadIdx.x % 32; token < format::kTileTokens; token += 32)
          reinterpret_cast<P*>(to + i * dense_row_bytes(params_.dense.dtype))[token] =
              token < exist ? from[token] : P(0.f);
      }
    });
  }

 private:
  Params const& params_;
  Segment segment_;
  int64_t head_offset_ = 0, first_token_ = 0;
};

}  // namespace cute_kernels::matmul
