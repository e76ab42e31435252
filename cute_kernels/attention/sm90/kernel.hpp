// The kernel of CC 9.0: producer warps beside workers that each read their own piece's tiles from their own stages.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cute_kernels/attention/mainloop.hpp"
#include "cute_kernels/attention/sm90/load.hpp"

namespace cute_kernels::attention::sm90 {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = 4;
static_assert(kProducers == kWarpgroupWarps);

// Registers of a thread, by how many warpgroups work beside the producers': what the compiler may use at launch, dealt
// anew by setmaxnreg.
template <int kWarpgroups>
struct RegisterBudget;
template <>
struct RegisterBudget<2> {
  static constexpr int kProducer = 56, kWorker = 224;
};
template <>
struct RegisterBudget<3> {
  static constexpr int kProducer = 56, kWorker = 152;
};
template <>
struct RegisterBudget<4> {
  static constexpr int kProducer = 64, kWorker = 104;
};

template <int kWarpgroups>
inline constexpr int kMaxThreads = (kWarpgroups + 1) * kWarpgroupThreads;

// By the registers that the compiler needs.
template <class Traits>
inline constexpr int kMaxWarpgroups = Traits::kRegisters <= 104   ? 4
                                      : Traits::kRegisters <= 140 ? 3
                                                                  : 2;

inline constexpr int kWorkersBarrier = 0;

template <class Traits>
struct Storage {
  static constexpr int kMaxWorkers = kMaxWarpgroups<Traits> * kWarpgroupWarps / Traits::kWorkerWarps;
  static_assert(kMaxWorkers <= attention::kMaxWorkers);

  Exchange<Traits> exchanges[kMaxWorkers];
  RingBarriers barriers;
  int last_segment[kMaxWorkers];
};
template <class Traits>
inline constexpr int kFixedBytes = (sizeof(Storage<Traits>) + 127) / 128 * 128;

template <class Traits>
class WorkerPipeline {
 public:
  CUTE_DEVICE WorkerPipeline(StageRing const& ring, int worker)
      : ring_(ring), worker_(worker), first_(worker * ring.params.stages.count) {}

  CUTE_DEVICE Stage next() {
    ring_.barriers.full[first_ + turn_].wait(phase_);
    ptx::compiler_fence();  // the library's wait does not say that it orders memory
    return ring_[first_ + turn_];
  }

  // written: the worker wrote to the stage; the copy that fills it next must not overtake that.
  CUTE_DEVICE void release(bool written = false) {
    if (written) cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring_.barriers.empty[first_ + turn_].arrive();
    if (++turn_ == ring_.params.stages.count) turn_ = 0, phase_ ^= 1;
  }

  // Room for this worker's share of its last segment, when all workers have read all their tiles.
  CUTE_DEVICE Share<Traits>* finish() {
    sync_workers();
    return reinterpret_cast<Share<Traits>*>(ring_.data) + worker_;
  }

  CUTE_DEVICE void sync_workers() {
    ptx::named_barrier(kWorkersBarrier, Traits::kWorkerThreads * ring_.params.workers);
  }

 private:
  StageRing const& ring_;
  int worker_, first_, turn_ = 0;
  uint32_t phase_ = 0;
};

template <class Traits>
__global__ void __launch_bounds__(kMaxThreads<kMaxWarpgroups<Traits>>, 1)
    attention_kernel(CUTE_GRID_CONSTANT Params const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Budget = RegisterBudget<kMaxWarpgroups<Traits>>;
  ptx::launch_dependents();
  auto& storage = *reinterpret_cast<Storage<Traits>*>(shared);
  int all_stages = params.workers * params.stages.count;
  StageRing ring{params, storage.barriers, shared + kFixedBytes<Traits>};
  WorkLine<Traits::kN> line(params, reinterpret_cast<int*>(ring.data + all_stages * params.stages.stage_bytes));
  if (threadIdx.x < all_stages) {
    storage.barriers.full[threadIdx.x].init(1);
    storage.barriers.empty[threadIdx.x].init(Traits::kWorkerWarps);
    cutlass::arch::fence_barrier_init();
  }
  line.prepare();
  __syncthreads();
  line.cut();

  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), first_producer = blockDim.x / 32 - kWarpgroupWarps;
  if (warp >= first_producer) {
    cutlass::arch::warpgroup_reg_dealloc<Budget::kProducer>();
    load_tiles(ring, line, warp - first_producer);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Budget::kWorker>();
    Worker<Traits> worker(warp);
    if (worker.index >= params.workers) return;  // workers need not fill their last warpgroup
    UnitRange piece = line.piece(worker.index);
    WorkerPipeline<Traits> pipeline(ring, worker.index);
    storage.last_segment[worker.index] =
        attend<Traits>(params, line, piece, worker, storage.exchanges[worker.index], pipeline);
    pipeline.sync_workers();
    add_up_shares<Traits>(params, line, reinterpret_cast<Share<Traits> const*>(ring.data), storage.last_segment,
                          Traits::kWorkerThreads * params.workers);
  }
}

}  // namespace cute_kernels::attention::sm90
