// The stages that producers fill for the CTA's workers: a few for each, in a ring.
#pragma once

#include <cutlass/arch/barrier.h>

#include "cute_kernels/attention/stage.hpp"
#include "cute_kernels/attention/work.hpp"
#include "cute_kernels/common/ptx.hpp"

namespace cute_kernels::attention::sm90 {

inline constexpr int kMinStages = 2, kMaxStagesOfWorker = 6;
inline constexpr int kMaxStages = 48;  // of a CTA
inline constexpr int kProducers = 4;   // warps; worker w is served by producer w % kProducers

// Every worker has stages of its own: a barrier's parity tells one phase from the next only, so whoever waits at it
// must see every phase.
struct RingBarriers {
  cutlass::arch::ClusterTransactionBarrier full[kMaxStages];  // a producer's arrival and the bytes of the tile
  cutlass::arch::ClusterBarrier empty[kMaxStages];            // the worker's arrival
};

struct StageRing {
  Params const& params;
  RingBarriers& barriers;
  uint8_t* data;

  CUTE_DEVICE Stage operator[](int index) const { return {params.stages, data + index * params.stages.stage_bytes}; }
};

}  // namespace cute_kernels::attention::sm90
