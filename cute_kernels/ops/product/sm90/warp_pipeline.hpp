// The products on CC 9.0 where warps multiply whole tiles (mma.sync), for few query rows: producer warps beside workers
// that each read their own split's tiles from the ring.
#pragma once

#include "cute_kernels/ops/product/sm90/tile_load.hpp"
#include "cute_kernels/pipeline/warp_roles_sm90a.hpp"

namespace cute_kernels::product::sm90 {

using pipeline::kMaxThreads;
using pipeline::kWarpgroupWarps;

// By the registers that the compiler needs, which is less than Traits::kRegisters where it must.
template <class Traits>
inline constexpr int kMaxWarpgroups = Traits::kRegisters <= 124   ? 4
                                      : Traits::kRegisters <= 168 ? 3
                                                                  : 2;

inline constexpr int kWarpFixedBytes = (sizeof(pipeline::RingBarriers) + 127) / 128 * 128;

// DenseRows: prepare(work_tile, tile, stage) completes the stage of a tile, with all lanes.
template <class DenseRows>
class WarpPipeline {
 public:
  CUTE_DEVICE WarpPipeline(pipeline::Stages const& stages, StageRing const& ring, int worker,
                           DenseRows const& dense_rows)
      : stages_(stages), ring_(ring), reader_(ring, worker), dense_rows_(dense_rows) {}

  CUTE_DEVICE Stage next(schedule::WorkTile const& work_tile, int tile) {
    Stage stage(stages_, reader_.wait());
    dense_rows_.prepare(work_tile, tile, stage);
    return stage;
  }

  CUTE_DEVICE void release() {
    // The copy that fills the stage next must overtake neither the loads nor, of keys, this warp's logits.
    cutlass::arch::fence_view_async_shared();
    reader_.release();
  }

  CUTE_DEVICE void sync_workers() {
    pipeline::sync(pipeline::NamedBarrier::kAllWorkers, 32 * ring_.shape.workers.divisor);
  }

 private:
  pipeline::Stages const& stages_;
  StageRing const& ring_;
  pipeline::RingReader reader_;
  DenseRows dense_rows_;
};

// Sets the CTA up; calls consume(schedule, ring, worker) in the workers' warps.
template <class Traits, class Policy, class DenseLoad, class Params, class Consume>
CUTE_DEVICE void run_warps(Params const& params, uint8_t* shared, Consume&& consume) {
  StageRing ring{params.ring, *reinterpret_cast<pipeline::RingBarriers*>(shared), shared + kWarpFixedBytes, 1};
  schedule::Schedule<Policy> schedule(params.schedule, nullptr);
  pipeline::split_roles<kMaxWarpgroups<Traits>>(
      [&](int producer) { load_tiles<DenseLoad>(params, schedule, ring, producer); },
      [&] {
        // From a shuffle or not, by what the compiler then keeps in registers: neither way suits both roles.
        int worker = Traits::kIsKey ? __shfl_sync(~0u, threadIdx.x / 32, 0) : threadIdx.x / 32;
        bool works = worker < params.ring.workers.divisor;  // workers need not fill their last warpgroup
        if (works) ring.open(worker);
        ring.arrive();
        if (works) consume(schedule, ring, worker);
      });
}

}  // namespace cute_kernels::product::sm90
