// How a kernel is laid over one device. dispatch/ chooses it from the kernel's limits.
#pragma once

#include <cuda_runtime_api.h>

#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::pipeline {

inline constexpr int kMaxProducers = 4;  // warps that fill a ring

// How shared memory is divided into stages, the same for every worker.
struct Stages {
  int count;        // of a worker, or of all where they share one ring
  int block_bytes;  // for one tile's block
  int stage_bytes;  // the block and behind it, in KernelLimits::rows_behind rows or more, what comes with it
};

// Of a CTA, at most. Producers divide both, for each waits for its own tiles: of another's it would not see every phase.
struct TilesInFlight {
  int first;  // one a producer at least, until the ring has been filled once: memory serves all requests at once, and the
              // fewer there are, the sooner the first tiles are complete
  int later;  // no fewer than first and no more than stages; 0: no limit
};

// A worker consumes whole tiles: a warp, two warps, or a warpgroup.
struct Config {
  int n;                     // query rows a pass, one of the kernel's
  int workers;               // a CTA, one CTA an SM
  int ctas;                  // of the grid
  int producers;             // warps that fill a ring of stages; 0: workers fill their own
  TilesInFlight in_flight;   // of the ring
  int splits_per_work_tile;  // of every work tile, none reaching into another; 0: the whole schedule is partitioned
  bool in_cluster;           // a cluster has all splits of its work tiles, and combines them
  int cluster;               // CTAs of it, else 1
  int summed_splits;         // of a CTA, which adds their partials up before it stores them; 0: it stores each
  bool programmatic_launch;  // kernels may be set up while the one before drains (CC 9.0)
};

// What the choice depends on, from the kernel's traits.
struct KernelLimits {
  int max_workers;
  int worker_warps;
  int min_stages, max_stages;        // of a worker; of a CTA if `one_ring`
  int min_block_bytes;               // of a stage: a block's bytes may also take results
  int fixed_shared_bytes;            // of a CTA, beside the stages
  int rows_behind = 2;               // of a block, that the decoder may read: see CodecBits
  bool one_ring = false;             // of stages for all workers
  int stages_ahead = 0;              // of those, beyond one a worker, at most
  bool whole_steps = false;          // thin work: workers in as many as fill the schedulers, which producers divide
  bool combines_in_cluster = false;  // workers' partials of a work tile can be combined within a cluster
  bool sums_in_cta = false;          // else those of a CTA are added up before they are stored
};

}  // namespace cute_kernels::pipeline
