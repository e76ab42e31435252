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

inline Partition make_partition(int total, cutlass::FastDivmod const& splits) {
  Partition partition;
  partition.total = total;
  splits(partition.size, partition.remainder, total);
  return partition;
}

// Which of a work tile's KV tiles are in a split. Window tiles come first, up to window_end: KV tile t of them is the
// window's (t - first_window)-th. KV tile t of the others is compressed tile t - first_tile.
struct KvTileMap {
  int first_window, window_end, first_tile;
};

// How one work tile is partitioned (Params::by_work_tile): window tiles are dealt to its splits as evenly as can be,
// then compressed tiles such that costs are as even as can be. The longer splits are the last of every stretch as to
// cost, the first as to the window: the workers that begin first have the window.
struct WorkTilePartition {
  cutlass::FastDivmod const& splits;
  Partition const& costs;
  int window_tiles, window_tile_cost;

  // Before the split.
  CUTE_HOST_DEVICE int compressed_tiles_before(int split) const {
    return costs.begin(split, splits) - window_tile_cost * window_tiles_before(split);
  }
  CUTE_HOST_DEVICE int window_tiles_before(int split) const {
    return splits.div(split * window_tiles + splits.divisor - 1);
  }
  CUTE_HOST_DEVICE int tiles_before(int split) const {
    return compressed_tiles_before(split) + window_tiles_before(split);
  }
  // KV tiles of any split at most.
  CUTE_HOST_DEVICE int longest() const { return costs.longest() + (window_tile_cost ? 0 : window_tiles_before(1)); }

  // begin: the work tile's first KV tile.
  CUTE_HOST_DEVICE KvTileMap tile_map(int begin, int split) const {
    int first_window = begin + compressed_tiles_before(split), window_end = window_tiles_before(split + 1);
    return {first_window, first_window + window_end, begin + window_end};
  }
};

}  // namespace cute_kernels::schedule
