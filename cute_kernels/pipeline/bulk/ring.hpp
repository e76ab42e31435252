// The stages that producers fill by bulk copies for the CTA's workers: one ring for all of them.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/fast_math.h>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/pipeline/config.hpp"
#include "cute_kernels/pipeline/named_barriers.hpp"

namespace cute_kernels::pipeline {

inline constexpr int kMaxStages = 48;  // of a CTA

struct RingShape {
  cutlass::FastDivmod workers;  // of a CTA
  int stages;                   // of a CTA
  int producers;                // divide both
  int producer_workers;         // workers / producers
  int producer_stages;          // stages / producers
  int stage_bytes;
  TilesInFlight in_flight;
};

inline RingShape ring_shape(Stages const& stages, Config const& config) {
  return {cutlass::FastDivmod(config.workers), stages.count,       config.producers, config.workers / config.producers,
          stages.count / config.producers,     stages.stage_bytes, config.in_flight};
}

// Iterations of the workers interleave: worker w's tile of iteration i is number n = i * workers + w, and lies in stage
// n % stages as the stage's use n / stages. Producer n % producers loads it.
struct RingIndex {
  int stage, use;
};

// A barrier's parity tells one phase from the next only, so whoever waits for a phase must know that the one before the
// last is over.
//
//   empty  is waited for by the stage's producer, always the same, since producers divide stages: it sees every phase
//   full   a stage's even and odd uses have barriers of their own. A worker that waits for tile n has read tile
//          n - workers, which the same producer, since producers divide workers, issued after tile n - stages or with
//          it; for that it had seen this stage released by tile n - 2 stages. A producer waits for tiles of its own:
//          to issue one it had seen the stage's use before released, and the next but one it has not issued
struct RingBarriers {
  cutlass::arch::ClusterTransactionBarrier full[2][kMaxStages];  // a producer's arrival and the bytes of the tile
  cutlass::arch::ClusterBarrier empty[kMaxStages];               // one arrival from every warp of the worker
};

struct StageRing {
  RingShape const& shape;
  RingBarriers& barriers;
  uint8_t* data;
  int warps_per_worker;

  CUTE_DEVICE uint8_t* operator[](RingIndex at) const { return data + at.stage * shape.stage_bytes; }
  CUTE_DEVICE auto& full(RingIndex at) const { return barriers.full[at.use & 1][at.stage]; }
  CUTE_DEVICE auto& empty(RingIndex at) const { return barriers.empty[at.stage]; }

  CUTE_DEVICE void wait_full(RingIndex at) const { full(at).wait(at.use >> 1 & 1); }
  // A fresh stage counts as empty.
  CUTE_DEVICE void wait_empty(RingIndex at) const { empty(at).wait(~at.use & 1); }

  // In one warp of every worker: makes barriers, of the worker's first stage among others. It sees those of others when
  // its first tile has come, for producers begin when all are made.
  CUTE_DEVICE void open(int worker) const {
    if (threadIdx.x % 32 == 0) {
      for (int stage = worker; stage < shape.stages; stage += shape.workers.divisor) {
        barriers.full[0][stage].init(1), barriers.full[1][stage].init(1);
        barriers.empty[stage].init(warps_per_worker);
      }
      cutlass::arch::fence_barrier_init();
    }
    __syncwarp();
  }
  // Once in every warp: `join` waits until all barriers are made.
  CUTE_DEVICE void join() const { pipeline::sync(NamedBarrier::kStart, blockDim.x); }
  CUTE_DEVICE void arrive() const { pipeline::arrive(NamedBarrier::kStart, blockDim.x); }
};

// A worker's position in the ring.
class RingReader {
 public:
  CUTE_DEVICE RingReader(StageRing const& ring, int worker) : ring_(ring), at_{worker, 0} {}

  CUTE_DEVICE uint8_t* wait() const { return wait_for(at_); }
  // For the tile behind it, before this one is released.
  CUTE_DEVICE uint8_t* wait_for_next() const { return wait_for(behind(at_)); }

  // In every warp that reads the stage, when its loads are done: the arrival does not wait for them, and those that
  // wait behind stores to global memory have been overtaken by the copy that fills the stage next.
  CUTE_DEVICE void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring_.empty(at_).arrive();
    at_ = behind(at_);
  }

 private:
  CUTE_DEVICE RingIndex behind(RingIndex at) const {
    at.stage += ring_.shape.workers.divisor;
    if (at.stage >= ring_.shape.stages) at.stage -= ring_.shape.stages, ++at.use;
    return at;
  }
  CUTE_DEVICE uint8_t* wait_for(RingIndex at) const {
    ring_.wait_full(at);
    ptx::compiler_fence();  // the library's wait does not say that it orders memory
    return ring_[at];
  }

  StageRing const& ring_;
  RingIndex at_;
};

}  // namespace cute_kernels::pipeline
