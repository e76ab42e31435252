// The roles of a CTA's warps: a warpgroup of producers, and workers in those beside it.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cute_kernels/matmul/sm90/load.hpp"

namespace cute_kernels::matmul::sm90 {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = 4;

// Registers of a thread, by how many warpgroups work beside the producers': what the compiler may use at launch, dealt
// anew by setmaxnreg.
template <int kWarpgroups>
struct RegisterBudget;
template <>
struct RegisterBudget<2> {
  static constexpr int kProducer = 40, kWorker = 232;
};
template <>
struct RegisterBudget<3> {
  static constexpr int kProducer = 40, kWorker = 152;
};
template <>
struct RegisterBudget<4> {
  static constexpr int kProducer = 40, kWorker = 104;
};

static_assert(kMaxProducers == kWarpgroupWarps);

template <int kWarpgroups>
inline constexpr int kMaxThreads = (kWarpgroups + 1) * kWarpgroupThreads;

// Calls load(producer) in the last warpgroup, work(warp of the CTA) in all others. Workers open the ring, producers
// join when they have looked up where their first tiles are.
template <int kWarpgroups, class Load, class Work>
CUTE_DEVICE void split_roles(Load&& load, Work&& work) {
  using Budget = RegisterBudget<kWarpgroups>;
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), first_of_producer = blockDim.x / 32 - kWarpgroupWarps;
  if (warp >= first_of_producer) {
    cutlass::arch::warpgroup_reg_dealloc<Budget::kProducer>();
    load(warp - first_of_producer);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Budget::kWorker>();
    work(warp);
  }
}

}  // namespace cute_kernels::matmul::sm90
