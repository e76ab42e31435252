// The attention kernel of CC 9.0: producer warps beside workers that read the tiles of their own splits from one ring
// of stages.
#pragma once

#include "cute_kernels/common/device.hpp"
#include "cute_kernels/common/prefetch_params.hpp"
#include "cute_kernels/ops/attention/mainloop.hpp"
#include "cute_kernels/ops/attention/sm90/load.hpp"
#include "cute_kernels/pipeline/warp_roles_sm90a.hpp"
#include "cute_kernels/reduce/cluster_combine.hpp"
#include "cute_kernels/reduce/cluster_rows.hpp"

namespace cute_kernels::attention::sm90 {

using pipeline::kMaxThreads;
using pipeline::kWarpgroupThreads;
using pipeline::kWarpgroupWarps;

// By the registers that the compiler needs; with three those of D 256 and of narrow codecs spill.
template <class Traits>
inline constexpr int kMaxWarpgroups = Traits::kRegisters <= 104               ? 4
                                      : Traits::kN > 8 && !Traits::kHasScales ? 3
                                                                              : 2;
template <class Traits>
inline constexpr int kProducerRegisters = kMaxWarpgroups<Traits> == 4                              ? 56
                                          : kMaxWarpgroups<Traits> == 3 && Traits::kHeadDim == 128 ? 72
                                                                                                   : 88;

template <class Traits>
struct Storage {
  static constexpr int kMaxWorkers = kMaxWarpgroups<Traits> * kWarpgroupWarps / Traits::kWorkerWarps;
  static_assert(kMaxWorkers <= schedule::kMaxWorkers && kMaxWorkers <= pipeline::kMaxWorkerBarriers);

  SharedP<Traits> p[kMaxWorkers];
  pipeline::RingBarriers barriers;
  PrefetchedParams prefetched_params;
};
template <class Traits>
inline constexpr int kFixedBytes = (sizeof(Storage<Traits>) + 127) / 128 * 128;

template <class Traits>
class WorkerPipeline {
 public:
  static constexpr bool kCombinesInCluster = true;

  // A worker passes through `empty_iterations` after its last.
  CUTE_DEVICE WorkerPipeline(RingParams const& params, StageRing const& ring, int worker, int empty_iterations)
      : params_(params), ring_(ring), reader_(ring, worker), worker_(worker), empty_iterations_(empty_iterations) {}

  CUTE_DEVICE Stage next() { return {params_.stages, reader_.wait()}; }

  // The scales of the tile's values. Waits for their stage, which is behind that of the keys.
  CUTE_DEVICE uint8_t const* value_scales(Stage const&) const {
    return reader_.wait_for_next() + Traits::TileFormat::scale_row(Traits::kHeadDim) * format::kRowBytes;
  }

  // loads_used: all that was loaded from the stage has been used, before a barrier of the worker's warps. Else the copy
  // that fills it next must be kept from overtaking loads.
  CUTE_DEVICE void release(bool loads_used = false) {
    if (!loads_used) cutlass::arch::fence_view_async_shared();
    reader_.release();
  }

  // Those that only workers with a longer split use: producers wait until every stage has been released.
  CUTE_DEVICE void pass_empty_iterations() {
    CUTE_NO_UNROLL
    for (int i = 0; i < empty_iterations_; ++i) next(), release();
  }

  // If in_cluster: for this worker's partial of its work tile, in the stages, when all workers have read all tiles.
  CUTE_DEVICE typename Traits::Partial* partial() {
    pass_empty_iterations();
    sync_workers();
    return reinterpret_cast<typename Traits::Partial*>(ring_.data) + worker_;
  }

  CUTE_DEVICE void sync_workers() {
    pipeline::sync(pipeline::NamedBarrier::kAllWorkers, Traits::kWorkerThreads * params_.schedule.workers);
  }

 private:
  RingParams const& params_;
  StageRing const& ring_;
  pipeline::RingReader reader_;
  int worker_, empty_iterations_;
};

// Aligned as what lies in it needs: WGMMA's swizzled operands repeat every 1024 bytes.
template <class Traits>
CUTE_DEVICE uint8_t* dynamic_shared() {
  if constexpr (Traits::kByWarpgroup) {
    extern __shared__ __align__(1024) uint8_t swizzled[];
    return swizzled;
  } else {
    extern __shared__ __align__(128) uint8_t shared[];
    return shared;
  }
}

// What puts the partials of a cluster together.
template <class Traits>
using CombineOf =
    std::conditional_t<Traits::kByWarpgroup,
                       reduce::ClusterRows<typename Traits::OutputShape, typename Traits::Element,
                                           typename Traits::SchedulePolicy, kMaxCluster * Storage<Traits>::kMaxWorkers>,
                       reduce::ClusterCombine<reduce::LogSumExp, typename Traits::OutputShape, typename Traits::Element,
                                              typename Traits::SchedulePolicy>>;

template <class Traits>
__global__ void __launch_bounds__(kMaxThreads<kMaxWarpgroups<Traits>>, 1)
    attention_kernel(CUTE_GRID_CONSTANT RingParams const params) {
  uint8_t* shared = dynamic_shared<Traits>();
  auto& storage = *reinterpret_cast<Storage<Traits>*>(shared);
  prefetch_params(params, storage.prefetched_params);
  ptx::wait_for_primary();
  prefetch_lengths<Traits>(params);
  using Combine = CombineOf<Traits>;
  typename Traits::Schedule schedule(params.schedule, shared + kFixedBytes<Traits>);
  StageRing ring{params.ring, storage.barriers, shared + kFixedBytes<Traits> + params.schedule_bytes,
                 Traits::kWorkerWarps};
  prefetch_tile_rows<Traits>(params, schedule);
  schedule.prepare();
  schedule.prepare_splits();

  pipeline::split_roles<kMaxWarpgroups<Traits>, kProducerRegisters<Traits>>(
      [&](int producer) { load_tiles<Traits>(params, schedule, ring, producer); },
      [&] {
        Worker<Traits> worker(__shfl_sync(~0u, threadIdx.x / 32, 0));
        bool works = worker.index < params.schedule.workers;  // workers need not fill their last warpgroup
        if (works && worker.part == 0) ring.open(worker.index);
        if (works) worker.sync();
        ring.arrive();
        if (!works) return;
        schedule::Range split = schedule.split_of_worker(worker.index);
        WorkerPipeline<Traits> pipeline(params, ring, worker.index,
                                        2 * (schedule.longest_split() - (split.end - split.begin)));
        attend<Traits>(params, schedule, split, worker, storage.p[worker.index], pipeline);
        ptx::launch_dependents();  // late: its CTAs find no free SM before
        if (!params.schedule.in_cluster) return pipeline.pass_empty_iterations();
        Combine combine(params.schedule, params.output, params.cluster, schedule);
        combine.arrive();
        int threads = Traits::kWorkerThreads * params.schedule.workers;
        auto* partials = reinterpret_cast<typename Traits::Partial*>(ring.data);
        auto sync_workers = [&] { pipeline.sync_workers(); };
        if constexpr (Traits::kByWarpgroup) {
          using Tables = typename Combine::Tables;
          static_assert(sizeof(Tables) <= SharedP<Traits>::kBytes);
          combine.write(partials, threads, *static_cast<Tables*>(storage.p[0].bytes()), sync_workers);
        } else {
          combine.write(partials, threads, combine.first_destination(threads), sync_workers);
        }
      });
}

}  // namespace cute_kernels::attention::sm90
