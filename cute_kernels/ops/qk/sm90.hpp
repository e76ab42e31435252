// sparse_qk on CC 9.0. Definitions behind launch.hpp, included by the instantiations only.
#pragma once

#include "cute_kernels/ops/product/sm90/launch.hpp"
#include "cute_kernels/ops/qk/launch.hpp"
#include "cute_kernels/ops/qk/multiply_keys.hpp"
#include "cute_kernels/ops/qk/sm90_params.hpp"
#include "cute_kernels/ops/qk/warpgroup/kernel.hpp"

namespace cute_kernels::qk::sm90 {

struct NoDenseRows {
  CUTE_DEVICE void prepare(schedule::WorkTile const&, int, Stage const&) {}
};

template <class Traits>
__global__ void __launch_bounds__(pipeline::kMaxThreads<product::sm90::kMaxWarpgroups<Traits>>, 1)
    sparse_qk_warps(CUTE_GRID_CONSTANT RingParams const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  product::sm90::run_warps<Traits, schedule::ProductPolicy<Traits::kN>, NoDenseLoad>(
      params, shared, [&](auto const& schedule, auto const& ring, int worker) {
        product::sm90::WarpPipeline<NoDenseRows> pipeline(params.stages, ring, worker, {});
        multiply_keys<Traits>(params, schedule, schedule.split_of_worker(worker), pipeline);
      });
}

template <int kHeadDim, class Codecs>
pipeline::KernelLimits limits(format::CodecId codec, int n) {
  return product::sm90::visit_traits<format::Role::kKey, kHeadDim, Codecs>(codec, n, [](auto traits) {
    using T = decltype(traits);
    if constexpr (product::sm90::kByWarps<T>)
      return product::sm90::warp_limits<T>(logits_bytes<T>(), false);
    else
      return product::sm90::warpgroup_limits<T, WarpgroupStorage<T>>();
  });
}

template <int kHeadDim, class Codecs>
void launch(Params const& params, pipeline::Config const& config, cudaStream_t stream) {
  RingParams ring_params = pipeline::ring_params(params, params.stages, config);
  ring_params.prefetch_row_offsets = pipeline::row_offset_prefetch(params.sparse, config);
  product::sm90::visit_traits<format::Role::kKey, kHeadDim, Codecs>(params.sparse.codec, config.n, [&](auto traits) {
    using T = decltype(traits);
    if constexpr (product::sm90::kByWarps<T>) {
      product::sm90::launch(sparse_qk_warps<T>, ring_params, config, 32, product::sm90::kWarpFixedBytes, stream);
    } else {
      bool wide = params.out_dtype == DType::kFloat32;
      product::sm90::launch(wide ? sparse_qk_warpgroups<T, true> : sparse_qk_warpgroups<T, false>, ring_params, config,
                            mma::kWarpgroupThreads, product::sm90::kWarpgroupsFixedBytes<T, WarpgroupStorage<T>>,
                            stream);
    }
  });
}

template <int kHeadDim, class Codecs>
Launcher<Params> launcher() {
  return {product::sm90::kMaxRows<Codecs>, limits<kHeadDim, Codecs>, launch<kHeadDim, Codecs>};
}

}  // namespace cute_kernels::qk::sm90
