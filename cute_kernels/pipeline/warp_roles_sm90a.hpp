// The roles of a CTA's warps on CC 9.0: a warpgroup of producers, and workers in those beside it. setmaxnreg, which
// gives workers the registers that producers do not need, is of sm_90a alone.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cute_kernels/pipeline/bulk/ring.hpp"

namespace cute_kernels::pipeline {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = 4;

static_assert(kMaxProducers == kWarpgroupWarps);

template <int kWarpgroups>
inline constexpr int kMaxThreads = (kWarpgroups + 1) * kWarpgroupThreads;

// Registers of a thread where kWarpgroups of workers are beside the producers: what the compiler may use at launch,
// dealt anew by setmaxnreg, which takes multiples of 8.
template <int kWarpgroups, int kProducerRegisters>
struct RegisterBudget {
  static constexpr int kLaunch = 65536 / kMaxThreads<kWarpgroups> / 8 * 8;
  static constexpr int kProducer = kProducerRegisters;
  static constexpr int kWorker = ((kWarpgroups + 1) * kLaunch - kProducer) / kWarpgroups / 8 * 8;
};

// Calls load(producer) in the last warpgroup, work() in all others. Workers open the ring, producers
// join when they have looked up where their first tiles are.
template <int kWarpgroups, int kProducerRegisters = 56, class Load, class Work>
CUTE_DEVICE void split_roles(Load&& load, Work&& work) {
  using Budget = RegisterBudget<kWarpgroups, kProducerRegisters>;
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), first_of_producer = blockDim.x / 32 - kWarpgroupWarps;
  if (warp >= first_of_producer) {
    cutlass::arch::warpgroup_reg_dealloc<Budget::kProducer>();
    load(warp - first_of_producer);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Budget::kWorker>();
    work();
  }
}

}  // namespace cute_kernels::pipeline
