// CTAs that have segments to themselves: a cluster has all pieces of one, or every CTA all pieces of its own.
#pragma once

#include <cooperative_groups.h>

#include <algorithm>
#include <cute/arch/cluster_sm90.hpp>

#include "cute_kernels/matmul/items.hpp"
#include "cute_kernels/matmul/launch.hpp"

namespace cute_kernels::matmul::sm90 {

// Worked out on the host: at the end of a kernel every division takes a while.
struct ClusterShape {
  int ctas, ctas_log2;  // of a cluster
  int pieces;           // of a segment that a CTA has
  int segments;         // that a CTA has pieces of
  Items items;          // of a segment, dealt to the CTAs in equal parts

  CUTE_DEVICE int rank() const { return ctas > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0; }
  // Of the segments of all CTAs.
  CUTE_DEVICE int first_segment() const { return (blockIdx.x >> ctas_log2) * segments; }
  // A CTA's.
  CUTE_DEVICE int items_log2(int atoms_log2) const { return items.count_log2(atoms_log2) - ctas_log2; }

  // Every `step`-th piece of a segment, counted through the CTAs of the cluster: calls use(load(share)) with what its
  // CTA has at `first`, for that CTA's first piece, or `stride` further on for the next. Some loads at a time.
  template <class T, class Load, class Use>
  CUTE_DEVICE void for_pieces(int begin, int step, T* first, int stride, Load&& load, Use&& use) const {
    constexpr int kAtOnce = 4;
    int end = pieces << ctas_log2;
    CUTE_NO_UNROLL
    for (int i = begin; i < end; i += kAtOnce * step) {
      decltype(load(*first)) values[kAtOnce];
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        int index = i + j * step;
        T* share = first + (index >> ctas_log2) * stride;
        if (ctas > 1) share = cooperative_groups::cluster_group::map_shared_rank(share, index & (ctas - 1));
        if (index < end) values[j] = load(*share);
      }
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j)
        if (i + j * step < end) use(values[j]);
    }
  }
};

// rows: of a KV head.
inline ClusterShape cluster_shape(Config const& config, int rows) {
  ClusterShape shape{config.cluster, 0, config.workers, 1, items_of(rows)};
  while (1 << shape.ctas_log2 < config.cluster) ++shape.ctas_log2;
  if (config.segment_pieces > 0) {
    shape.pieces = std::min(config.segment_pieces, config.workers);
    shape.segments = config.workers / shape.pieces;
  }
  return shape;
}

}  // namespace cute_kernels::matmul::sm90
