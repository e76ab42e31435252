// CTAs that have work tiles to themselves: a cluster has all splits of one, or every CTA all splits of its own.
#pragma once

#include <cooperative_groups.h>
#include <cutlass/fast_math.h>

#include <algorithm>
#include <cute/arch/cluster_sm90.hpp>

#include "cute_kernels/pipeline/config.hpp"

namespace cute_kernels::pipeline {

// Worked out on the host: at the end of a kernel every division takes a while.
struct ClusterShape {
  cutlass::FastDivmod ctas;  // of a cluster
  int splits;                // of a work tile that a CTA has
  int work_tiles;            // that a CTA has splits of

  CUTE_DEVICE bool is_one_cta() const { return ctas.divisor == 1; }
  CUTE_DEVICE int rank() const { return is_one_cta() ? 0 : static_cast<int>(cute::block_rank_in_cluster()); }
  // Of the work tiles of all CTAs.
  CUTE_DEVICE int first_work_tile() const { return ctas.div(blockIdx.x) * work_tiles; }

  // Of a split of a work tile, counted through the CTAs of the cluster: what its CTA has at `first`, for that CTA's first
  // split, or `stride` further on for the next.
  template <class T>
  CUTE_DEVICE T* split(T* first, int stride, int index) const {
    int of_cta, cta;
    ctas(of_cta, cta, index);
    T* partial = first + of_cta * stride;
    return is_one_cta() ? partial : cooperative_groups::cluster_group::map_shared_rank(partial, cta);
  }

  // Calls use(load(partial)) for every `step`-th split of a work tile. kAtOnce loads at a time.
  template <int kAtOnce, class T, class Load, class Use>
  CUTE_DEVICE void for_splits(int begin, int step, T* first, int stride, Load&& load, Use&& use) const {
    int end = splits * ctas.divisor;
    CUTE_NO_UNROLL
    for (int i = begin; i < end; i += kAtOnce * step) {
      decltype(load(*first)) values[kAtOnce];
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        int index = i + j * step;
        T* partial = split(first, stride, index);
        if (index < end) values[j] = load(*partial);
      }
      CUTE_UNROLL
      for (int j = 0; j < kAtOnce; ++j)
        if (i + j * step < end) use(values[j]);
    }
  }
};

inline ClusterShape cluster_shape(Config const& config) {
  ClusterShape shape{cutlass::FastDivmod(config.cluster), config.workers, 1};
  if (config.in_cluster) {
    shape.splits = std::min(config.splits_per_work_tile, config.workers);
    shape.work_tiles = config.workers / shape.splits;
  }
  return shape;
}

}  // namespace cute_kernels::pipeline
