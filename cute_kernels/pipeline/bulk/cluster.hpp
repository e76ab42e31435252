// CTAs that have work tiles to themselves: a cluster has all splits of one, or every CTA all splits of its own.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>
#include <cute/arch/cluster_sm90.hpp>

#include "cute_kernels/pipeline/config.hpp"

namespace cute_kernels::pipeline {

// Worked out on the host: at the end of a kernel every division takes a while.
struct ClusterShape {
  int ctas, ctas_log2;  // of a cluster
  int splits;           // of a work tile that a CTA has
  int work_tiles;       // that a CTA has splits of

  CUTE_DEVICE int rank() const { return ctas > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0; }
  // Of the work tiles of all CTAs.
  CUTE_DEVICE int first_work_tile() const { return (blockIdx.x >> ctas_log2) * work_tiles; }

  // Every `step`-th split of a work tile, counted through the CTAs of the cluster: calls use(load(partial)) with what
  // its CTA has at `first`, for that CTA's first split, or `stride` further on for the next. Some loads at a time.
  template <class T, class Load, class Use>
  CUTE_DEVICE void for_splits(int begin, int step, T* first, int stride, Load&& load, Use&& use) const {
    constexpr int kAtOnce = 4;
    int end = splits << ctas_log2;
    CUTE_NO_UNROLL
    for (int i = begin; i < end; i += kAtOnce * step) {
      decltype(load(*first)) values[kAtOnce];
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        int index = i + j * step;
        T* partial = first + (index >> ctas_log2) * stride;
        if (ctas > 1) partial = cooperative_groups::cluster_group::map_shared_rank(partial, index & (ctas - 1));
        if (index < end) values[j] = load(*partial);
      }
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j)
        if (i + j * step < end) use(values[j]);
    }
  }
};

inline ClusterShape cluster_shape(Config const& config) {
  ClusterShape shape{config.cluster, 0, config.workers, 1};
  while (1 << shape.ctas_log2 < config.cluster) ++shape.ctas_log2;
  if (config.in_cluster) {
    shape.splits = std::min(config.splits_per_work_tile, config.workers);
    shape.work_tiles = config.workers / shape.splits;
  }
  return shape;
}

}  // namespace cute_kernels::pipeline
