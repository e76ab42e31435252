// How work is partitioned into splits, worked out from a few numbers on host and device alike.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/config.hpp>

namespace cute_kernels::schedule {

// `total` things in splits of `size`, some of them longer by one, the first shorter by `lead`.
struct Partition {
  int total, size, remainder, lead;

  CUTE_HOST_DEVICE int longest() const { return size + (remainder > 0); }
  // Where a split begins. The longer ones are spread evenly, from the second on: the first may have other work, and the
  // first tiles of a CTA come before its last ones.
  CUTE_HOST_DEVICE int begin(int split, cutlass::FastDivmod const& splits) const {
    int begin = split * size + splits.div((split - 1) * remainder + splits.divisor - 1) - lead;
    return begin > 0 ? begin : 0;
  }
};

// lead: no more than total / splits.
CUTE_HOST_DEVICE Partition make_partition(int total, cutlass::FastDivmod const& splits, int lead = 0) {
  Partition partition;
  partition.total = total;
  partition.lead = lead;
  splits(partition.size, partition.remainder, total + lead);
  return partition;
}

}  // namespace cute_kernels::schedule
