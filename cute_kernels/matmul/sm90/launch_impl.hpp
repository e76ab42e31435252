// Definitions behind launch.hpp for CC 9.0, included by the instantiations only.
#pragma once

#include "cute_kernels/matmul/launch_clusters.hpp"
#include "cute_kernels/matmul/launch_combine.hpp"
#include "cute_kernels/matmul/sm90/tensor_map.hpp"
#include "cute_kernels/matmul/sm90/warp_kernels.hpp"
#include "cute_kernels/matmul/warpgroup/multiply_keys.hpp"
#include "cute_kernels/matmul/warpgroup/multiply_values.hpp"

namespace cute_kernels::matmul::sm90 {

// Calls f with the traits of a (dtype, N): a warp multiplies up to 16 rows with mma.sync, a warpgroup more with WGMMA.
template <Role kRole, int kHeadDim, class F>
auto visit_traits(format::DType dtype, int n, F&& f) {
  auto visit_n = [&](auto element) {
    using Element = decltype(element);
    if (n == 8) return f(Traits<kRole, Element, kHeadDim, 8>{});
    if (n == 32) return f(warpgroup::Traits<kRole, Element, kHeadDim, 32>{});
    if (n == 64) return f(warpgroup::Traits<kRole, Element, kHeadDim, 64>{});
    return f(Traits<kRole, Element, kHeadDim, 16>{});
  };
  return dtype == format::DType::kFloat16 ? visit_n(half_t{}) : visit_n(bfloat16_t{});
}

template <class Traits>
inline constexpr bool kByWarps = Traits::kN <= 16;

template <Role kRole, int kHeadDim>
KernelLimits limits(format::DType dtype, int n) {
  return visit_traits<kRole, kHeadDim>(dtype, n, [](auto traits) -> KernelLimits {
    using T = decltype(traits);
    if constexpr (kByWarps<T>) {
      constexpr int kMaxWarps = kMaxWarpgroups<T> * kWarpgroupWarps;
      static_assert(kMaxWarps <= kMaxWorkers);
      // A stage takes a tile's logits; the stages, no fewer than workers, take their shares in the end.
      constexpr int kResultBytes = T::kIsKey ? logits_bytes<T>() : share_bytes<T>();
      return {kMaxWarps, 1, 2, kMaxStages, kResultBytes, kWarpFixedBytes, true, kStagesAhead, !T::kIsKey};
    } else {
      return {
          T::kMaxWarpgroups, kWarpgroupWarps, 2, kMaxStages, 0, warpgroup::kFixedBytes<T>, true, kStagesAhead, false};
    }
  });
}

inline void launch_product(void (*kernel)(TmaParams), Params const& params, Config const& config, int worker_threads,
                           int fixed_bytes, cudaStream_t stream) {
  int warpgroups = (config.workers * worker_threads + kWarpgroupThreads - 1) / kWarpgroupThreads;
  launch_clusters(kernel, with_tensor_map(params, config), config, (warpgroups + 1) * kWarpgroupThreads,
                  fixed_bytes + params.stages.count * params.stages.stage_bytes, stream);
}

template <Role kRole, int kHeadDim>
void launch(Params const& params, Config const& config, cudaStream_t stream) {
  visit_traits<kRole, kHeadDim>(params.sparse.dtype, config.n, [&](auto traits) {
    using T = decltype(traits);
    [[maybe_unused]] bool converts = params.dense.dtype != params.sparse.dtype;
    if constexpr (kRole == Role::kKey && kByWarps<T>) {
      launch_product(sparse_qk_warps<T>, params, config, 32, kWarpFixedBytes, stream);
    } else if constexpr (kRole == Role::kKey) {
      using warpgroup::sparse_qk_warpgroups;
      bool wide = params.out_dtype == format::DType::kFloat32;
      launch_product(wide ? sparse_qk_warpgroups<T, true> : sparse_qk_warpgroups<T, false>, params, config,
                     kWarpgroupThreads, warpgroup::kFixedBytes<T>, stream);
    } else if constexpr (kByWarps<T>) {
      launch_product(converts ? sparse_av_warps<T, true> : sparse_av_warps<T, false>, params, config, 32,
                     kWarpFixedBytes, stream);
      if (!params.work.by_segments) launch_combine<T>(params, config, config.workers, stream);
    } else {
      using warpgroup::sparse_av_warpgroups;
      launch_product(converts ? sparse_av_warpgroups<T, true> : sparse_av_warpgroups<T, false>, params, config,
                     kWarpgroupThreads, warpgroup::kFixedBytes<T>, stream);
      launch_combine<T>(params, config, 1, stream);
    }
  });
}

}  // namespace cute_kernels::matmul::sm90
