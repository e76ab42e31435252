// sparse_av on CC 9.0. Definitions behind launch.hpp, included by the instantiations only.
#pragma once

#include "cute_kernels/ops/av/launch.hpp"
#include "cute_kernels/ops/av/multiply_values.hpp"
#include "cute_kernels/ops/av/p_rows.hpp"
#include "cute_kernels/ops/av/tensor_map.hpp"
#include "cute_kernels/ops/av/warpgroup/kernel.hpp"
#include "cute_kernels/ops/product/sm90/launch.hpp"
#include "cute_kernels/reduce/cluster_combine.hpp"
#include "cute_kernels/reduce/cta_sum.hpp"
#include "cute_kernels/reduce/split_combine.hpp"

namespace cute_kernels::av::sm90 {

// Without a tensor map the workers copy p into their stages themselves.
struct PCopy {
  RingParams const& params;

  CUTE_DEVICE void prepare(schedule::WorkTile const& work_tile, int tile, Stage const& stage) const {
    if (params.has_p_map) return;
    PRows(params, work_tile, tile).copy(stage.dense_rows);
    __syncwarp();
  }
};

// kConverts: p is not in the type of V, or is to be scaled.
template <class Traits, bool kConverts>
__global__ void __launch_bounds__(pipeline::kMaxThreads<product::sm90::kMaxWarpgroups<Traits>>, 1)
    sparse_av_warps(CUTE_GRID_CONSTANT RingParams const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Policy = schedule::ProductPolicy<Traits::kN>;
  using Combine = reduce::ClusterCombine<reduce::Sum, OutputShape<Traits>, typename Traits::Dense, Policy>;
  ptx::launch_dependents();
  if (params.has_p_map && threadIdx.x == 0)
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.p_map));
  product::sm90::run_warps<Traits, Policy, PLoad>(
      params, shared, [&](auto const& schedule, auto const& ring, int worker) {
        product::sm90::WarpPipeline<PCopy> pipeline(params.stages, ring, worker, {params});
        Combine combine(params.schedule, params.output, params.cluster, schedule);
        // When all tiles have been read the stages take partials, and behind them, where every stage has more room than its
        // partial needs, the work tiles that these are of.
        auto* stages = reinterpret_cast<Partial<Traits>*>(ring.data);
        int workers = params.schedule.workers, *last_work_tiles = reinterpret_cast<int*>(stages + workers);
        schedule::Range split = schedule.split_of_worker(worker);
        multiply_values<Traits, kConverts>(
            params, schedule, split, pipeline, [&](auto const& tCrC, schedule::WorkTile const& work_tile) {
              if (work_tile.tiles.end < split.end)
                return store_partial<Traits>(tCrC, work_tile.rows,
                                             reduce::crossing_partial<Partial<Traits>>(params.output, work_tile.index));
              pipeline.sync_workers();
              store_partial<Traits>(tCrC, work_tile.rows, stages + worker);
              if (threadIdx.x % 32 == 0) last_work_tiles[worker] = work_tile.index;
            });
        auto sync_workers = [&] { pipeline.sync_workers(); };
        if (params.schedule.in_cluster) {
          combine.arrive();
          return combine.write(stages, 32 * workers, combine.first_destination(32 * workers), sync_workers);
        }
        sync_workers();
        reduce::sum_in_cta<OutputShape<Traits>>(params.output, ring.data, sizeof(Partial<Traits>), last_work_tiles,
                                                workers);
      });
}

template <int kHeadDim, class Codecs>
pipeline::KernelLimits limits(format::CodecId codec, int n) {
  return product::sm90::visit_traits<format::Role::kValue, kHeadDim, Codecs>(codec, n, [](auto traits) {
    using T = decltype(traits);
    if constexpr (product::sm90::kByWarps<T>)
      return product::sm90::warp_limits<T>(sizeof(Partial<T>), true);
    else
      return product::sm90::warpgroup_limits<T, WarpgroupStorage<T>>();
  });
}

template <int kHeadDim, class Codecs>
void launch(Params const& params, pipeline::Config const& config, cudaStream_t stream) {
  RingParams ring_params{};
  static_cast<pipeline::RingParams<Params>&>(ring_params) = pipeline::ring_params(params, params.stages, config);
  ring_params.prefetch_row_offsets = pipeline::row_offset_prefetch(params.sparse, config);
  make_p_map(ring_params, config.n);
  bool converts = params.dense.dtype != params.sparse.dtype;
  product::sm90::visit_traits<format::Role::kValue, kHeadDim, Codecs>(params.sparse.codec, config.n, [&](auto traits) {
    using T = decltype(traits);
    if constexpr (T::kHasScales)
      product::sm90::launch(sparse_av_warps<T, true>, ring_params, config, 32, product::sm90::kWarpFixedBytes, stream);
    else if constexpr (product::sm90::kByWarps<T>)
      product::sm90::launch(converts ? sparse_av_warps<T, true> : sparse_av_warps<T, false>, ring_params, config, 32,
                            product::sm90::kWarpFixedBytes, stream);
    else
      product::sm90::launch(converts ? sparse_av_warpgroups<T, true> : sparse_av_warpgroups<T, false>, ring_params,
                            config, mma::kWarpgroupThreads,
                            product::sm90::kWarpgroupsFixedBytes<T, WarpgroupStorage<T>>, stream);
    if (params.schedule.in_cluster) return;
    reduce::launch_combine<reduce::Sum, OutputShape<T>, typename T::Dense, schedule::ProductPolicy<T::kN>>(
        params.schedule, params.output, config, 0, stream);
  });
}

template <int kHeadDim, class Codecs>
Launcher<Params> launcher() {
  return {product::sm90::kMaxRows<Codecs>, limits<kHeadDim, Codecs>, launch<kHeadDim, Codecs>};
}

}  // namespace cute_kernels::av::sm90
