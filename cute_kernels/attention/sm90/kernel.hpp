// The kernel of CC 9.0: producer warps beside workers that read the tiles of their own pieces from one ring of stages.
#pragma once

#include "cute_kernels/attention/mainloop.hpp"
#include "cute_kernels/attention/sm90/finish_segments.hpp"
#include "cute_kernels/attention/sm90/load.hpp"
#include "cute_kernels/matmul/sm90/roles.hpp"

namespace cute_kernels::attention::sm90 {

using matmul::sm90::kMaxThreads;
using matmul::sm90::kWarpgroupThreads;
using matmul::sm90::kWarpgroupWarps;

// By the registers that the compiler needs; with three the kernel of D 256 spills.
template <class Traits>
inline constexpr int kMaxWarpgroups = Traits::kRegisters <= 104 ? 4 : 2;
template <class Traits>
inline constexpr int kProducerRegisters = kMaxWarpgroups<Traits> == 4 ? 56 : 88;

inline constexpr int kWorkersBarrier = 0;

template <class Traits>
struct Storage {
  static constexpr int kMaxWorkers = kMaxWarpgroups<Traits> * kWarpgroupWarps / Traits::kWorkerWarps;
  static_assert(kMaxWorkers <= attention::kMaxWorkers);

  Exchange<Traits> exchanges[kMaxWorkers];
  matmul::sm90::RingBarriers barriers;
};
template <class Traits>
inline constexpr int kFixedBytes = (sizeof(Storage<Traits>) + 127) / 128 * 128;

template <class Traits>
class WorkerPipeline {
 public:
  static constexpr bool kJoinsSegments = true;

  // A worker passes through `empty_turns` turns after its last.
  CUTE_DEVICE WorkerPipeline(RingParams const& params, StageRing const& ring, int worker, int empty_turns)
      : params_(params), ring_(ring), reader_(ring, worker), worker_(worker), empty_turns_(empty_turns) {}

  CUTE_DEVICE Stage next() { return {params_.stages, reader_.wait()}; }

  // loads_used: all that was loaded from the stage, before a meeting of the worker's warps. Else the copy that fills it
  // next must be kept from overtaking loads.
  CUTE_DEVICE void release(bool loads_used = false) {
    if (!loads_used) cutlass::arch::fence_view_async_shared();
    reader_.release();
  }

  // Those that only workers with a longer piece use: producers wait until every stage has been released.
  CUTE_DEVICE void pass_empty_turns() {
    CUTE_NO_UNROLL
    for (int turn = 0; turn < empty_turns_; ++turn) next(), release();
  }

  // If by_segments: room for this worker's share of its segment, when all workers have read all their tiles.
  CUTE_DEVICE Share<Traits>* room_for_share() {
    pass_empty_turns();
    sync_workers();
    return reinterpret_cast<Share<Traits>*>(ring_.data) + worker_;
  }

  CUTE_DEVICE void sync_workers() { ptx::named_barrier(kWorkersBarrier, Traits::kWorkerThreads * params_.workers); }

 private:
  RingParams const& params_;
  StageRing const& ring_;
  matmul::sm90::RingReader reader_;
  int worker_, empty_turns_;
};

template <class Traits>
__global__ void __launch_bounds__(kMaxThreads<kMaxWarpgroups<Traits>>, 1)
    attention_kernel(CUTE_GRID_CONSTANT RingParams const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& storage = *reinterpret_cast<Storage<Traits>*>(shared);
  WorkLine<Traits> line(params, shared + kFixedBytes<Traits>);
  StageRing ring{params.ring, storage.barriers, shared + kFixedBytes<Traits> + params.line_bytes, Traits::kWorkerWarps};
  line.prepare();
  line.deal_pieces();

  matmul::sm90::split_roles<kMaxWarpgroups<Traits>, kProducerRegisters<Traits>>(
      [&](int producer) { load_tiles<Traits>(params, line, ring, producer); },
      [&] {
        Worker<Traits> worker(__shfl_sync(~0u, threadIdx.x / 32, 0));
        bool works = worker.index < params.workers;  // workers need not fill their last warpgroup
        if (works && worker.part == 0) ring.open(worker.index);
        if (works) worker.sync();
        ring.arrive();
        if (!works) return;
        UnitRange piece = line.piece_of_worker(worker.index);
        WorkerPipeline<Traits> pipeline(params, ring, worker.index, 2 * (line.longest() - (piece.end - piece.begin)));
        attend<Traits>(params, line, piece, worker, storage.exchanges[worker.index], pipeline);
        ptx::launch_dependents();  // late: its CTAs find no room before, and it is measured to be faster
        if (!params.by_segments) return pipeline.pass_empty_turns();
        SegmentResults<Traits>(params, line).write(reinterpret_cast<Share<Traits>*>(ring.data), [&] {
          pipeline.sync_workers();
        });
      });
}

}  // namespace cute_kernels::attention::sm90
