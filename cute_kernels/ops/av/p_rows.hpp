// The rows of p that come with a tile of values.
#pragma once

#include "cute_kernels/ops/av/params.hpp"
#include "cute_kernels/ops/product/stage.hpp"
#include "cute_kernels/pipeline/cp_async.hpp"

namespace cute_kernels::av {

// Of one tile of a work tile.
class PRows {
 public:
  CUTE_DEVICE PRows(Params const& params, schedule::WorkTile const& work_tile, int tile)
      : params_(params),
        work_tile_(work_tile),
        first_token_(int64_t{tile - work_tile.tiles.begin} * format::kTileTokens),
        head_offset_(params.head_offset(work_tile)) {}

  CUTE_DEVICE int rows() const { return work_tile_.rows; }

  // Tokens that exist.
  CUTE_DEVICE int tokens() const {
    return static_cast<int>(cute::min(int64_t{format::kTileTokens}, params_.sparse.tokens - first_token_));
  }

  CUTE_DEVICE uint8_t const* row(int index) const {
    int64_t offset = head_offset_ + params_.row_offset(work_tile_.first_row + index) + first_token_;
    return static_cast<uint8_t const*>(params_.dense.data) + offset * dtype_bytes(params_.dense.dtype);
  }

  // With all lanes, through registers: for rows that no bulk or vector copy can take. Tokens beyond the last are zeros.
  CUTE_DEVICE void copy(uint8_t* to) const {
    int exist = tokens();
    visit_dtype(params_.dense.dtype, [&](auto type) {
      using P = decltype(type);
      CUTE_NO_UNROLL
      for (int i = 0; i < rows(); ++i) {
        auto const* from = reinterpret_cast<P const*>(row(i));
        CUTE_UNROLL
        for (int token = threadIdx.x % 32; token < format::kTileTokens; token += 32)
          reinterpret_cast<P*>(to + i * product::dense_row_bytes(params_.dense.dtype))[token] =
              token < exist ? from[token] : P(0.f);
      }
    });
  }

  // With all lanes, by cp.async. Rows start on 16 bytes.
  CUTE_DEVICE void copy_async(uint8_t* to) const {
    constexpr int kBytes = pipeline::kCpAsyncBytes;
    int valid_bytes = tokens() * dtype_bytes(params_.dense.dtype);
    int row_bytes = product::dense_row_bytes(params_.dense.dtype);
    int log_copies = dtype_bytes(params_.dense.dtype) == 4 ? 4 : 3;  // copies of a row
    CUTE_NO_UNROLL
    for (int i = threadIdx.x % 32; i < rows() << log_copies; i += 32) {
      int row_index = i >> log_copies, offset = (i & ((1 << log_copies) - 1)) * kBytes;
      int valid = max(0, min(kBytes, valid_bytes - offset));
      ptx::cp_async_16(cute::cast_smem_ptr_to_uint(to + row_index * row_bytes + offset),
                       row(row_index) + (valid ? offset : 0), valid);
    }
  }

 private:
  Params const& params_;
  schedule::WorkTile const& work_tile_;
  int64_t first_token_, head_offset_;
};

}  // namespace cute_kernels::av
