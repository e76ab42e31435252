// A CTA's shared memory, and the barriers by which its warpgroups pass tiles on.
//
//   global --bulk copies--> block stages of a decoder --decoded--> operand stages --WGMMA--> consumers
//
// Tiles pass through the operand stages in steps, two operands each. Where the softmax of a tile overlaps with the product
// of the tile before, a step has the keys of the one and the values of the other; else both are of one tile.
//
//   step        0    1    ...  n-1     n           step        0    1    ...  n-1
//   number 2s   K0   K1   ...  Kn-1    (none)      number 2s   K0   K1   ...  Kn-1
//   2s + 1    (none) V0   ...  Vn-2    Vn-1        2s + 1      V0   V1   ...  Vn-1
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/cluster_sm90.hpp>

#include "cute_kernels/common/prefetch_params.hpp"
#include "cute_kernels/ops/attention/prefill/traits.hpp"
#include "cute_kernels/ops/attention/prefill/work_tile.hpp"
#include "cute_kernels/pipeline/named_barriers.hpp"

namespace cute_kernels::attention::prefill {

inline constexpr int kMaxBlockStages = 8;                           // of a decoder
inline constexpr int kScaleScratchBytes = format::kTileTokens * 2;  // a scale of 16 bits for each token
// The quarter of a tile that a decoder's warp expands. The warp of the first quarter, which has no values before it to count,
// loads blocks, that of the second one copies operands to the cluster's other CTA. The loading warps of decoders are of
// different schedulers.
inline constexpr int kLoadingQuarter = 0, kCopyingQuarter = 1;
CUTE_DEVICE int quarter_of_warp(int decoder) {
  return static_cast<int>(threadIdx.x / 32 + kWarpgroupWarps - decoder % kWarpgroupWarps) % kWarpgroupWarps;
}

// An operand of a step; numbers as above.
template <class Traits>
struct Operand {
  bool is_value;
  int tile;

  CUTE_DEVICE explicit Operand(int number)
      : is_value(number % 2 != 0), tile(number / 2 - (is_value ? Traits::kValuesLag : 0)) {}

  CUTE_DEVICE static int count(int tiles) { return 2 * (tiles + Traits::kValuesLag); }

  // Not as values of the first step, keys of the last.
  CUTE_DEVICE bool exists(int tiles) const { return static_cast<unsigned>(tile) < static_cast<unsigned>(tiles); }

  // By so many numbers.
  template <int kNumbers>
  CUTE_DEVICE void advance() {
    if constexpr (kNumbers % 2 == 0) {
      tile += kNumbers / 2;
    } else {
      static_assert(kNumbers == 1 && Traits::kValuesLag == 0);
      if (is_value) ++tile;
      is_value = !is_value;
    }
  }
};

// Where an operand is in the ring of operand stages, and the parity of how often the ring has been gone round. Carried from
// one operand to the next: a division by the number of stages would be waited for before every tile, and
// cutlass::PipelineState has one where it advances by more than one stage.
template <class Traits>
struct Stage {
  unsigned index, phase = 0;

  CUTE_DEVICE void advance(unsigned operands) {  // at most kStages
    index += operands;
    if (index >= Traits::kStages) index -= Traits::kStages, phase ^= 1;
  }
};

// From one operand of a decoder to its next.
template <class Traits>
inline constexpr int kOperandStep = Traits::kDecoders * Traits::kClusterCtas;

// What is loaded for an operand: its block, of no bytes for a tile of the window or none, and token orders.
struct alignas(16) BlockSource {
  uint8_t const* block;
  uint32_t tile;              // of the view's
  uint32_t bytes_and_orders;  // a multiple of kRowBytes, and which orders

  static constexpr uint32_t kTokenOrder = 1, kValueOrder = 2;
  CUTE_DEVICE uint32_t orders() const { return bytes_and_orders % format::kRowBytes; }
  CUTE_DEVICE uint32_t bytes() const { return bytes_and_orders - orders(); }
};

// Of the threads of a warpgroup.
CUTE_DEVICE void sync_warpgroup() { pipeline::sync_worker(threadIdx.x / kWarpgroupThreads, kWarpgroupThreads); }

// With all lanes of a warp. By the vote the compiler knows that they stay together, and keeps what they have in common in
// uniform registers.
template <class Barrier>
CUTE_DEVICE void wait_together(Barrier const& barrier, uint32_t phase) {
  while (!__all_sync(~0u, barrier.try_wait(phase))) {
  }
  ptx::compiler_fence();  // the library's wait does not say that it orders memory
}

// Of all threads of a cluster.
CUTE_DEVICE void sync_whole_cluster() {
  ptx::compiler_fence();  // the library's barrier does not say that it orders memory
  cute::cluster_sync();
  ptx::compiler_fence();
}

// Operands are decoded by the decoders of all CTAs of a cluster in turn.
template <class Traits>
CUTE_DEVICE unsigned decoding_cta(unsigned stage) {
  return stage / Traits::kDecoders % Traits::kClusterCtas;
}

// By channel: where the elements go that a decoder copies from the window, and what they are multiplied by.
template <class Traits>
struct WindowPlaces {
  alignas(16) uint16_t offset[Traits::kHeadDim];  // bytes, of its element of token 0 in an operand stage
  float inverse_scale[Traits::kDecodesNarrow ? Traits::kHeadDim : 0];
};

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
  WindowPlaces<Traits> window_places[Traits::kDecoders];
  // Of consumers, if any codec has scales: those of the channels of keys and of values, and of the rows of S.
  alignas(16) float channel_scales[Traits::kDecodesNarrow ? Traits::kConsumers : 0][2][Traits::kHeadDim];
  float row_scale[Traits::kDecodesNarrow ? Traits::kConsumers : 0][kConsumerRows];
  // Of every decoding warp, if any codec has scales.
  alignas(16) uint8_t
      scale_scratch[Traits::kDecodesNarrow ? Traits::kDecoders : 0][kWarpgroupWarps][kScaleScratchBytes];
  alignas(8) uint8_t column_of_channel[Traits::kConsumers][Traits::kHeadDim];  // of O, in the order of values
  BlockSource block_sources[Traits::kDecoders][32];  // of operands that a decoder loads one after the other
  PrefetchedParams prefetched_params;
  WorkTile work_tile;  // here, and not in registers, of which decoders have few
  cutlass::arch::ClusterTransactionBarrier block_full[Traits::kDecoders][kMaxBlockStages];
  cutlass::arch::ClusterBarrier block_empty[Traits::kDecoders][kMaxBlockStages];  // of every decoding warp; no clusters
  cutlass::arch::ClusterTransactionBarrier operand_full[Traits::kBarriers];  // of every filling warp, for each operand
  cutlass::arch::ClusterBarrier operand_empty[Traits::kStages / Traits::kReleasedOperands];  // of every consuming warp

  // Where O of a row of the consumer goes, with its log-sum-exp behind it: 8 rows of a warp at a time, or all of them, where
  // no consumer needs q and stages any longer.
  CUTE_DEVICE float* out_rows(int consumer, int row, bool all) {
    static_assert(sizeof(buffer) + sizeof(stages) >= Traits::kRows * kOutStride * sizeof(float));
    if (all) return reinterpret_cast<float*>(this) + (consumer * kConsumerRows + row) * kOutStride;
    return buffer[consumer].out[row / 16][0];
  }

  // With one thread.
  CUTE_DEVICE void init_barriers(int block_stages) {
    for (int stage = 0; stage < block_stages; ++stage) {
      for (int decoder = 0; decoder < Traits::kDecoders; ++decoder) {
        block_full[decoder][stage].init(1);
        if constexpr (kFillingWarps > 1) block_empty[decoder][stage].init(kWarpgroupWarps);
      }
    }
    for (int i = 0; i < Traits::kBarriers; ++i) operand_full[i].init(kFillingWarps * Traits::kBarrierOperands);
    for (auto& barrier : operand_empty) barrier.init(kWarpgroupWarps * Traits::kConsumers * Traits::kClusterCtas);
    cutlass::arch::fence_barrier_init();
  }

  // Operands of a step that share a barrier are waited for, or released, together, by the stage of either.
  CUTE_DEVICE void wait_full(Stage<Traits> stage) {
    operand_full[barrier_of(stage.index)].wait(stage.phase);
    ptx::compiler_fence();  // the library's wait does not say that it orders memory
  }
  CUTE_DEVICE void wait_empty(Stage<Traits> stage) { wait_together(empty_of(stage.index), stage.phase ^ 1); }
  // By a decoder, before its CTA may end; stage: of the operand behind its last. What it has copied to the cluster's other
  // CTA is there then, and no consumer arrives any longer.
  CUTE_DEVICE void wait_all_empty(Stage<Traits> stage) {
    CUTE_NO_UNROLL
    for (int i = 0; i < Traits::kStages; i += kOperandStep<Traits>) {
      wait_empty(stage);
      stage.advance(kOperandStep<Traits>);
    }
  }
  // What this warp of a decoder has stored is there for WGMMA, and goes to the cluster's other CTA with what the other warps
  // have; the token order only where a query row does not see the whole tile. There is nothing to copy where a step lacks
  // the operand.
  CUTE_DEVICE void fill(unsigned stage, int quarter, bool exists, bool with_order) {
    ptx::compiler_fence();
    cutlass::arch::fence_view_async_shared();
    if constexpr (kFillingWarps == 1) {
      sync_warpgroup();
      if (quarter != kCopyingQuarter) return;
    } else {
      __syncwarp();
    }
    if (threadIdx.x % 32 != 0) return;
    operand_full[barrier_of(stage)].arrive();
    if constexpr (kFillingWarps == 1) copy_to_cta(stage, exists, with_order, cute::block_rank_in_cluster() ^ 1);
  }
  // This warp of the decoder has read a block, and its loading warp waits for all. There is nothing to do where they have met
  // when they filled the operand.
  CUTE_DEVICE void release_block(int decoder, int stage) {
    if constexpr (kFillingWarps > 1) {
      if (threadIdx.x % 32 == 0) block_empty[decoder][stage].arrive();
    }
  }
  CUTE_DEVICE void wait_block_empty(int decoder, int stage, uint32_t phase) {
    if constexpr (kFillingWarps > 1) wait_together(block_empty[decoder][stage], phase);
  }
  // This warp has used it: said to the CTA that fills it.
  CUTE_DEVICE void release(unsigned stage) {
    __syncwarp();
    auto& barrier = empty_of(stage);
    if (threadIdx.x % 32 != 0) return;
    if constexpr (Traits::kClusterCtas > 1)
      barrier.arrive(decoding_cta<Traits>(stage));
    else
      barrier.arrive();
  }

 private:
  // Where no CTA waits for copies, the warps of a decoder do not wait for one another.
  static constexpr int kFillingWarps = Traits::kClusterCtas > 1 ? 1 : kWarpgroupWarps;

  CUTE_DEVICE static unsigned barrier_of(unsigned stage) { return stage / Traits::kBarrierOperands; }
  CUTE_DEVICE cutlass::arch::ClusterBarrier& empty_of(unsigned stage) {
    return operand_empty[stage / Traits::kReleasedOperands];
  }

  CUTE_DEVICE void copy_to_cta(unsigned stage, bool exists, bool with_order, uint32_t cta) {
    auto& full = operand_full[barrier_of(stage)];
    if (!exists) return full.arrive(cta);
    constexpr int kBytes = Traits::kStageElements * sizeof(Element);
    full.arrive_and_expect_tx(with_order ? kBytes + kOrderBytes : kBytes, cta);
    ptx::bulk_copy_to_cta(stages[stage], kBytes, &full, cta);
    if (with_order) ptx::bulk_copy_to_cta(token_order[stage], kOrderBytes, &full, cta);
  }
};

}  // namespace cute_kernels::attention::prefill
