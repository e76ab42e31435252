// sparse_qk on CC 8.x: every warp fetches and multiplies the tiles of its own split. Definitions behind launch.hpp,
// included by the instantiations only.
#pragma once

#include "cute_kernels/ops/product/sm80/launch.hpp"
#include "cute_kernels/ops/qk/launch.hpp"
#include "cute_kernels/ops/qk/multiply_keys.hpp"

namespace cute_kernels::qk::sm80 {

// Nothing comes with a tile of keys but its block and order.
struct NoDenseRows {
  CUTE_DEVICE void fetch(schedule::WorkTile const&, int, Stage const&) {}
};

template <class Traits>
__global__ void __launch_bounds__(32 * Traits::kMaxWarps, 1) sparse_qk_kernel(CUTE_GRID_CONSTANT Params const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  using Policy = schedule::ProductPolicy<Traits::kN>;
  schedule::Schedule<Policy> schedule(params.schedule, nullptr);
  int warp = threadIdx.x / 32;
  schedule::Range split = schedule.split_of_worker(warp);
  product::sm80::WarpPipeline<Policy, NoDenseRows> pipeline(params, schedule, shared, warp, split, {});
  multiply_keys<Traits>(params, schedule, split, pipeline);
}

template <int kHeadDim, class Codecs>
pipeline::KernelLimits limits(format::CodecId codec, int n) {
  return product::sm80::visit_traits<format::Role::kKey, kHeadDim, Codecs>(codec, n, [](auto traits) {
    using T = decltype(traits);
    return product::sm80::limits<T>(logits_bytes<T>(), false);
  });
}

template <int kHeadDim, class Codecs>
void launch(Params const& params, pipeline::Config const& config, cudaStream_t stream) {
  product::sm80::visit_traits<format::Role::kKey, kHeadDim, Codecs>(params.sparse.codec, config.n, [&](auto traits) {
    product::sm80::launch(sparse_qk_kernel<decltype(traits)>, params, config, stream);
  });
}

template <int kHeadDim, class Codecs>
Launcher<Params> launcher() {
  return {product::sm80::kMaxRows<Codecs>, limits<kHeadDim, Codecs>, launch<kHeadDim, Codecs>};
}

}  // namespace cute_kernels::qk::sm80
