// What a stage in shared memory holds: the tile's block, for values its columns of p, and the token order.
#pragma once

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"
#include "cute_kernels/pipeline/config.hpp"

namespace cute_kernels::product {

inline constexpr int kOrderBytes = format::kTileTokens;

// One row of p: 64 tokens and 16 bytes, so that rows start in different banks.
CUTE_HOST_DEVICE constexpr int dense_row_elements(DType dtype) { return format::kTileTokens + 16 / dtype_bytes(dtype); }
CUTE_HOST_DEVICE constexpr int dense_row_bytes(DType dtype) { return dense_row_elements(dtype) * dtype_bytes(dtype); }

struct Stage {
  uint8_t* block;
  uint8_t* dense_rows;   // on 128 bytes
  uint8_t* token_order;  // the last bytes

  CUTE_DEVICE Stage(pipeline::Stages const& stages, uint8_t* data)
      : block(data), dense_rows(data + stages.block_bytes), token_order(data + stages.stage_bytes - kOrderBytes) {}
};

}  // namespace cute_kernels::product
