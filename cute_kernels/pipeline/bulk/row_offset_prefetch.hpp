// Row offsets of a CTA's first tiles, asked for while the producers still work out which tiles those are.
#pragma once

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/format/storage.hpp"
#include "cute_kernels/pipeline/config.hpp"

namespace cute_kernels::pipeline {

// Roughly: CTAs have equal parts of the storage, one after the other.
struct RowOffsetPrefetch {
  float tiles_per_cta;  // 0: not known, nothing is prefetched
  int tiles;            // of the storage

  // With one warp.
  CUTE_DEVICE void operator()(int32_t const* row_offsets) const {
    constexpr int kOffsets = 128 / sizeof(int32_t);  // in a line
    int ahead = threadIdx.x % 32 * kOffsets;
    if (tiles_per_cta > 0 && ahead < tiles_per_cta + kOffsets)
      ptx::prefetch(row_offsets + min(static_cast<int>(blockIdx.x * tiles_per_cta) + ahead, tiles));
  }
};

inline RowOffsetPrefetch row_offset_prefetch(format::SparseView const& view, Config const& config) {
  return {static_cast<float>(view.tiles()) / config.ctas, static_cast<int>(view.tiles())};
}

}  // namespace cute_kernels::pipeline
