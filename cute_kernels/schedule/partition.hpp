// How work is partitioned into splits, worked out from a few numbers on host and device alike.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/config.hpp>

namespace cute_kernels::schedule {

// `total` things in splits of `size`, some of them longer by one.
struct Partition {
  int total, size, remainder;

  CUTE_HOST_DEVICE int longest() const { return size + (remainder > 0); }
  // Where a split begins; the longer ones are spread evenly.
  CUTE_HOST_DEVICE int begin(int split, cutlass::FastDivmod const& splits) const {
    return split * size + splits.div(split * remainder);
  }
};

CUTE_HOST_DEVICE Partition make_partition(int total, cutlass::FastDivmod const& splits) {
  Partition partition;
  partition.total = total;
  splits(partition.size, partition.remainder, total);
  return partition;
}

}  // namespace cute_kernels::schedule
