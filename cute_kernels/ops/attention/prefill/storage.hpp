// A CTA's shared memory, and the barriers by which its warpgroups pass tiles on.
//
//   global --bulk copies--> block stages of a decoder --decoded--> operand stages --WGMMA--> consumers
//
// Tiles pass through the operand stages in the order in which consumers need them: S of a tile is multiplied before O of the tile
// before, so that its softmax overlaps with that. Operand numbers count them:
//
//   number   0   1   2   3   4   ...  2n-3  2n-2  2n-1
//            K0  K1  V0  K2  V1  ...  Kn-1  Vn-2  Vn-1
#pragma once

#include <cutlass/arch/barrier.h>

#include "cute_kernels/ops/attention/prefill/traits.hpp"
#include "cute_kernels/ops/attention/prefill/work_tile.hpp"
#include "cute_kernels/pipeline/named_barriers.hpp"

namespace cute_kernels::attention::prefill {

inline constexpr int kMaxBlockStages = 8;  // of a decoder

CUTE_HOST_DEVICE constexpr unsigned operand_of_keys(int tile) { return tile == 0 ? 0 : 2 * tile - 1; }
CUTE_HOST_DEVICE constexpr unsigned operand_of_values(int tile, int tiles) {
  return tile + 1 == tiles ? 2 * tile + 1 : 2 * tile + 2;
}

struct Operand {
  bool is_value;
  int tile;

  CUTE_HOST_DEVICE Operand(int number, int tiles)
      : is_value(number == 2 * tiles - 1 || (number > 0 && number % 2 == 0)),
        tile(number == 2 * tiles - 1 ? tiles - 1
             : is_value              ? number / 2 - 1
                                     : (number + 1) / 2) {}
};

// Of the threads of a warpgroup.
CUTE_DEVICE void sync_warpgroup() { pipeline::sync_worker(threadIdx.x / kWarpgroupThreads, kWarpgroupThreads); }

// Operands are decoded by the decoders of all CTAs of a cluster in turn.
template <class Traits>
CUTE_DEVICE unsigned decoding_cta(unsigned operand) {
  return operand / Traits::kDecoders % Traits::kClusterCtas;
}

template <class Traits>
struct Storage {
  using Element = typename Traits::Element;

  // Of a consumer: q on its way in, O on its way out.
  static constexpr int kOutStride = Traits::kHeadDim + 4;  // floats; rows in different banks
  static constexpr int kOutRows = 8;                       // of a warp at a time
  union alignas(1024) ConsumerBuffer {
    Element q[kConsumerRows * Traits::kHeadDim];
    float out[kWarpgroupWarps][kOutRows][kOutStride];
  };
  ConsumerBuffer buffer[Traits::kConsumers];
  alignas(1024) Element stages[Traits::kStages][Traits::kStageElements];
  alignas(16) uint8_t token_order[Traits::kStages][format::kTileTokens];  // of keys: token_position -> token
  uint8_t positions[Traits::kDecoders][2][format::kTileTokens];           // of values: token -> token_position
  WorkTile work_tile;  // here, and not in registers, of which decoders have few
  cutlass::arch::ClusterTransactionBarrier block_full[Traits::kDecoders][kMaxBlockStages];
  cutlass::arch::ClusterBarrier block_empty[Traits::kDecoders][kMaxBlockStages];  // an arrival of every warp
  cutlass::arch::ClusterTransactionBarrier operand_full[Traits::kStages];         // of every decoding warp
  cutlass::arch::ClusterBarrier operand_empty[Traits::kStages];                   // of every consuming warp

  // With one thread.
  CUTE_DEVICE void init_barriers() {
    for (int decoder = 0; decoder < Traits::kDecoders; ++decoder)
      for (int stage = 0; stage < kMaxBlockStages; ++stage)
        block_full[decoder][stage].init(1), block_empty[decoder][stage].init(kWarpgroupWarps);
    for (int stage = 0; stage < Traits::kStages; ++stage)
      operand_full[stage].init(kWarpgroupWarps),
          operand_empty[stage].init(kWarpgroupWarps * Traits::kConsumers * Traits::kClusterCtas);
    cutlass::arch::fence_barrier_init();
  }

  CUTE_DEVICE void wait_full(unsigned operand) {
    operand_full[operand % Traits::kStages].wait(operand / Traits::kStages & 1);
    ptx::compiler_fence();  // the library's wait does not say that it orders memory
  }
  CUTE_DEVICE void wait_empty(unsigned operand) {
    operand_empty[operand % Traits::kStages].wait(operand / Traits::kStages & 1 ^ 1);
    ptx::compiler_fence();
  }
  // What the warpgroup stored is there for WGMMA, and goes to the cluster's other CTA.
  CUTE_DEVICE void fill(unsigned number, bool is_value) {
    ptx::compiler_fence();
    cutlass::arch::fence_view_async_shared();
    if constexpr (Traits::kClusterCtas > 1) sync_warpgroup();  // warps copy what others have stored
    __syncwarp();
    unsigned stage = number % Traits::kStages;
    if (threadIdx.x % 32 != 0) return;
    if constexpr (Traits::kClusterCtas > 1) copy_quarter(stage, is_value, cute::block_rank_in_cluster() ^ 1);
    operand_full[stage].arrive();
  }
  // This warp has used it: said to the CTA that fills it.
  CUTE_DEVICE void release(unsigned operand) {
    __syncwarp();
    auto& barrier = operand_empty[operand % Traits::kStages];
    if (threadIdx.x % 32 != 0) return;
    if constexpr (Traits::kClusterCtas > 1)
      barrier.arrive(decoding_cta<Traits>(operand));
    else
      barrier.arrive();
  }

 private:
  // By each warp of the decoder.
  CUTE_DEVICE void copy_quarter(unsigned stage, bool is_value, uint32_t cta) {
    constexpr int kElements = Traits::kStageElements / kWarpgroupWarps, kBytes = kElements * sizeof(Element);
    constexpr int kOrderBytes = format::kTileTokens / kWarpgroupWarps;
    int warp = threadIdx.x / 32 % kWarpgroupWarps;
    operand_full[stage].arrive_and_expect_tx(is_value ? kBytes : kBytes + kOrderBytes, cta);
    ptx::bulk_copy_to_cta(&stages[stage][warp * kElements], kBytes, &operand_full[stage], cta);
    if (!is_value)
      ptx::bulk_copy_to_cta(&token_order[stage][warp * kOrderBytes], kOrderBytes, &operand_full[stage], cta);
  }
};

}  // namespace cute_kernels::attention::prefill
