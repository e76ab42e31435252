// The stages that producers fill for the CTA's workers, warps or warpgroups: a few for each worker, in a ring.
#pragma once

#include <cutlass/arch/barrier.h>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/matmul/sm90/params.hpp"
#include "cute_kernels/matmul/stage.hpp"
#include "cute_kernels/matmul/tile_scheduler.hpp"

namespace cute_kernels::matmul::sm90 {

inline constexpr int kMinStages = 2, kMaxStagesOfWarp = 3, kMaxStagesOfWarpgroup = 8;
inline constexpr int kMaxStages = 48;  // of a CTA
inline constexpr int kProducers = 4;   // warps; worker w is served by producer w % kProducers

// Every worker has stages of its own: a barrier's parity tells one phase from the next only, so whoever waits at it
// must see every phase.
struct RingBarriers {
  cutlass::arch::ClusterTransactionBarrier full[kMaxStages];  // a producer's arrival and the bytes of the tile
  cutlass::arch::ClusterBarrier empty[kMaxStages];            // one arrival from every warp of the worker

  CUTE_DEVICE void init(int stages, int warps_a_worker) {
    for (int i = 0; i < stages; ++i) full[i].init(1), empty[i].init(warps_a_worker);
    cutlass::arch::fence_barrier_init();
  }
};

struct StageRing {
  TmaParams const& params;
  RingBarriers& barriers;
  uint8_t* data;

  CUTE_DEVICE Stage operator[](int index) const { return {params.stages, data + index * params.stages.stage_bytes}; }
  CUTE_DEVICE TileRange piece(int worker) const {
    return piece_tiles(params.work, blockIdx.x * params.workers + worker);
  }
};

// A worker's way through its stages.
class RingReader {
 public:
  CUTE_DEVICE RingReader(StageRing const& ring, int worker) : ring_(ring), first_(worker * ring.params.stages.count) {}

  CUTE_DEVICE Stage wait() const {
    ring_.barriers.full[first_ + turn_].wait(phase_);
    ptx::compiler_fence();  // the library's wait does not say that it orders memory
    return ring_[first_ + turn_];
  }

  // In every warp that reads the stage.
  CUTE_DEVICE void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring_.barriers.empty[first_ + turn_].arrive();
    if (++turn_ == ring_.params.stages.count) turn_ = 0, phase_ ^= 1;
  }

 private:
  StageRing const& ring_;
  int first_, turn_ = 0;
  uint32_t phase_ = 0;
};

}  // namespace cute_kernels::matmul::sm90
