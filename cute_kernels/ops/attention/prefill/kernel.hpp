// Attention of many query rows (CC 9.0): decoder warpgroups expand compressed tiles into shared memory, consumer
// warpgroups multiply them by WGMMA. In the manner of FlashAttention-3 (arXiv 2407.08608), with decoders in place of the
// copies of K and V.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cute_kernels/ops/attention/prefill/consumer.hpp"
#include "cute_kernels/ops/attention/prefill/decoder.hpp"

namespace cute_kernels::attention::prefill {

template <class Traits>
inline constexpr int kFixedBytes = (sizeof(Storage<Traits>) + 127) / 128 * 128;

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) prefill_kernel(CUTE_GRID_CONSTANT Params const params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<Storage<Traits>*>(shared);
  WorkTile const& work_tile = storage.work_tile;
  prefetch_params(params, storage.prefetched_params);
  if (threadIdx.x == 32) storage.init_barriers(params.block_stages);
  // The fence of the barriers' initialisation is all that the other CTA waits for.
  if constexpr (Traits::kClusterCtas > 1) cute::cluster_arrive_relaxed();
  ptx::wait_for_primary();  // nothing above reads global memory
  if (threadIdx.x < 32) {
    WorkTile found = WorkTile::look_up(params, Traits::kRows, Traits::kClusterCtas);
    if (threadIdx.x == 0) storage.work_tile = found;
  }
  if constexpr (Traits::kClusterCtas > 1) cute::cluster_wait();
  __syncthreads();
  if (work_tile.of_absent_rows()) return;
  bool merges = Traits::kMayMerge && params.merges;
  int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
  // Code far behind the kernel's begin takes long to arrive, and the compiler puts the last case first: that of decoders,
  // whom all others wait for.
  if (warpgroup < Traits::kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Consumer<Traits>(params, work_tile, storage, warpgroup).run();
  } else {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kDecoderRegisters>();
    int decoder = warpgroup - Traits::kConsumers;
    uint8_t* stages = shared + kFixedBytes<Traits> + decoder * params.block_stages * params.stage_bytes;
    TileDecoder<Traits>(params, work_tile, storage, stages, decoder).run();
    if (merges) {  // as consumers do (store_output.hpp)
      sync_whole_cluster();
      cute::cluster_arrive_relaxed();
    }
  }
  if (merges) cute::cluster_wait();  // no CTA ends while another reads its results
}

}  // namespace cute_kernels::attention::prefill
