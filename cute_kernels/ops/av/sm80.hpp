// sparse_av on CC 8.x: every warp fetches and multiplies the tiles of its own split. Definitions behind launch.hpp,
// included by the instantiations only.
#pragma once

#include "cute_kernels/ops/av/launch.hpp"
#include "cute_kernels/ops/av/multiply_values.hpp"
#include "cute_kernels/ops/av/p_rows.hpp"
#include "cute_kernels/ops/product/sm80/launch.hpp"
#include "cute_kernels/reduce/cta_sum.hpp"
#include "cute_kernels/reduce/split_combine.hpp"

namespace cute_kernels::av::sm80 {

struct PFetch {
  Params const& params;

  CUTE_DEVICE void fetch(schedule::WorkTile const& work_tile, int tile, Stage const& stage) const {
    PRows rows(params, work_tile, tile);
    if (params.vector_loads)
      rows.copy_async(stage.dense_rows);
    else
      rows.copy(stage.dense_rows);
  }
};

// kConverts: p is not in the type of V, or is to be scaled.
template <class Traits, bool kConverts>
__global__ void __launch_bounds__(32 * Traits::kMaxWarps, 1) sparse_av_kernel(CUTE_GRID_CONSTANT Params const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int last_work_tiles[Traits::kMaxWarps];
  using Policy = schedule::ProductPolicy<Traits::kN>;
  ptx::launch_dependents();
  schedule::Schedule<Policy> schedule(params.schedule, nullptr);
  int warp = threadIdx.x / 32;
  schedule::Range split = schedule.split_of_worker(warp);
  product::sm80::WarpPipeline<Policy, PFetch> pipeline(params, schedule, shared, warp, split, {params});
  int own_bytes = params.stages.count * params.stages.stage_bytes;  // take the partial when all tiles have been read
  multiply_values<Traits, kConverts>(
      params, schedule, split, pipeline, [&](auto const& tCrC, schedule::WorkTile const& work_tile) {
        if (work_tile.tiles.end < split.end)
          return store_partial<Traits>(tCrC, work_tile.rows,
                                       reduce::crossing_partial<Partial<Traits>>(params.output, work_tile.index));
        __syncwarp();
        store_partial<Traits>(tCrC, work_tile.rows, reinterpret_cast<Partial<Traits>*>(shared + warp * own_bytes));
        if (threadIdx.x % 32 == 0) last_work_tiles[warp] = work_tile.index;
      });
  __syncthreads();
  reduce::sum_in_cta<OutputShape<Traits>>(params.output, shared, own_bytes, last_work_tiles, params.schedule.workers);
}

template <int kHeadDim, class Codecs>
pipeline::KernelLimits limits(format::CodecId codec, int n) {
  return product::sm80::visit_traits<format::Role::kValue, kHeadDim, Codecs>(codec, n, [](auto traits) {
    using T = decltype(traits);
    auto limits = product::sm80::limits<T>(sizeof(Partial<T>) / pipeline::kMinCpAsyncStages, true);
    limits.fixed_shared_bytes = T::kMaxWarps * sizeof(int);
    return limits;
  });
}

template <int kHeadDim, class Codecs>
void launch(Params const& params, pipeline::Config const& config, cudaStream_t stream) {
  product::sm80::visit_traits<format::Role::kValue, kHeadDim, Codecs>(params.sparse.codec, config.n, [&](auto traits) {
    using T = decltype(traits);
    if constexpr (T::kHasScales) {
      product::sm80::launch(sparse_av_kernel<T, true>, params, config, stream);
    } else {
      bool converts = params.dense.dtype != params.sparse.dtype;
      product::sm80::launch(converts ? sparse_av_kernel<T, true> : sparse_av_kernel<T, false>, params, config, stream);
    }
    reduce::launch_combine<reduce::Sum, OutputShape<T>, typename T::Dense, schedule::ProductPolicy<T::kN>>(
        params.schedule, params.output, config, 0, stream);
  });
}

template <int kHeadDim, class Codecs>
Launcher<Params> launcher() {
  return {product::sm80::kMaxRows<Codecs>, limits<kHeadDim, Codecs>, launch<kHeadDim, Codecs>};
}

}  // namespace cute_kernels::av::sm80
