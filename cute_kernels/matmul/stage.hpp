// What a stage in shared memory holds: the tile's block, its token order and, for values, its columns of p.
#pragma once

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/matmul/params.hpp"

namespace cute_kernels::matmul {

inline constexpr int kMinStages = 2, kMaxStages = 3;  // of a warp
inline constexpr int kOrderBytes = format::kTileTokens;

// One row of p: 64 tokens and 16 bytes, so that rows start in different banks.
CUTE_HOST_DEVICE constexpr int dense_row_bytes(format::DType dtype) {
  return format::kTileTokens * dtype_bytes(dtype) + 16;
}

struct Stage {
  uint8_t* block;
  int block_bytes;

  CUTE_DEVICE uint8_t* token_order() const { return block + block_bytes; }
  CUTE_DEVICE uint8_t* dense_rows() const { return token_order() + kOrderBytes; }
};

// A warp's stages, side by side.
struct Ring {
  uint8_t* data;
  int stage_bytes, block_bytes;

  CUTE_DEVICE Ring(Stages const& stages, uint8_t* shared, int warp)
      : data(shared + warp * stages.count * stages.stage_bytes),
        stage_bytes(stages.stage_bytes),
        block_bytes(stages.block_bytes) {}
  CUTE_DEVICE Stage operator[](int index) const { return {data + index * stage_bytes, block_bytes}; }
};

}  // namespace cute_kernels::matmul
