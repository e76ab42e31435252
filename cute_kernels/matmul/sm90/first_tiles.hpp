// Row offsets of a CTA's first tiles, asked for while the producers still work out which tiles those are.
#pragma once

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/format/storage.hpp"
#include "cute_kernels/matmul/launch.hpp"

namespace cute_kernels::matmul::sm90 {

// Roughly: CTAs have equal parts of the storage, one after the other.
struct FirstTiles {
  float a_cta;  // 0: not known
  int end;      // of the storage's tiles

  // With one warp.
  CUTE_DEVICE void prefetch(int32_t const* row_offsets) const {
    constexpr int kOffsets = 128 / sizeof(int32_t);  // in a line
    int ahead = threadIdx.x % 32 * kOffsets;
    if (a_cta > 0 && ahead < a_cta + kOffsets)
      ptx::prefetch(row_offsets + min(static_cast<int>(blockIdx.x * a_cta) + ahead, end));
  }
};

inline FirstTiles first_tiles(format::SparseView const& view, Config const& config) {
  return {static_cast<float>(view.tiles()) / config.ctas, static_cast<int>(view.tiles())};
}

}  // namespace cute_kernels::matmul::sm90
