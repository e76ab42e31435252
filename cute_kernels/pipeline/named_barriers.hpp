// The hardware's 16 named barriers of a CTA: who owns which. Every kernel takes its numbers from here.
#pragma once

#include "cute_kernels/common/ptx.hpp"

namespace cute_kernels::pipeline {

enum class NamedBarrier : int {
  kAllWorkers = 0,   // all workers of the CTA, without the producers
  kFirstWorker = 1,  // one for each worker, or each part of a CTA that works on its own
  kStart = 15,       // all warps: the ring's barriers are made
};

inline constexpr int kHardwareBarriers = 16;
inline constexpr int kMaxWorkerBarriers =
    static_cast<int>(NamedBarrier::kStart) - static_cast<int>(NamedBarrier::kFirstWorker);
static_assert(static_cast<int>(NamedBarrier::kStart) < kHardwareBarriers);
static_assert(NamedBarrier::kAllWorkers < NamedBarrier::kFirstWorker && kMaxWorkerBarriers == 14);

// `threads`, a multiple of 32, wait for one another.
CUTE_DEVICE void sync(NamedBarrier barrier, int threads) {
  ptx::named_barrier_sync(static_cast<int>(barrier), threads);
}
CUTE_DEVICE void arrive(NamedBarrier barrier, int threads) {
  ptx::named_barrier_arrive(static_cast<int>(barrier), threads);
}

// worker < kMaxWorkerBarriers
CUTE_DEVICE void sync_worker(int worker, int threads) {
  ptx::named_barrier_sync(static_cast<int>(NamedBarrier::kFirstWorker) + worker, threads);
}
// And learns whether `holds` is true in any of the threads.
CUTE_DEVICE bool sync_worker_any(int worker, int threads, bool holds) {
  return ptx::named_barrier_any(static_cast<int>(NamedBarrier::kFirstWorker) + worker, threads, holds);
}

}  // namespace cute_kernels::pipeline
