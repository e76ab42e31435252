// The warps that share tiles, and the shared memory by which they exchange P.
#pragma once

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/mma/scales.hpp"
#include "cute_kernels/ops/attention/traits.hpp"
#include "cute_kernels/pipeline/named_barriers.hpp"

namespace cute_kernels::attention {

template <class Traits>
struct Worker {
  int index;  // in the CTA
  int part;   // that this warp takes of every tile

  CUTE_DEVICE explicit Worker(int warp) : index(warp / Traits::kWorkerWarps), part(warp % Traits::kWorkerWarps) {}
  CUTE_DEVICE void sync() const { pipeline::sync_worker(index, Traits::kWorkerThreads); }
  // And learns whether it holds for any of the worker's threads.
  CUTE_DEVICE bool sync_any(bool holds) const {
    return pipeline::sync_worker_any(index, Traits::kWorkerThreads, holds);
  }
};

// The token orders of a pair of caches that were not compressed together; null if they share theirs.
struct TokenOrders {
  uint8_t const *keys, *values;
};

// A base of what follows where it is used: scales of values by token, for each warp.
template <class Traits, bool kUsed>
struct ScalesByToken {};
template <class Traits>
struct ScalesByToken<Traits, true> {
  uint16_t scale_of_token[Traits::kWorkerWarps][Traits::kTokens];
};

// One for a worker. Two buffers of P: a warp may be a tile ahead of the other until their next barrier. Of a warpgroup:
// warpgroup_operands.hpp.
template <class Traits, bool kByWarpgroup = Traits::kByWarpgroup>
class SharedP : private ScalesByToken<Traits, Traits::kHasScales && Traits::kSeparateOrders> {
 public:
  // This warp's part of P, as B fragments.
  template <class Fragment>
  CUTE_DEVICE void store(Worker<Traits> const& worker, int buffer, TokenOrders const& orders,
                         Fragment const& tCrP /* ((2,2),N/8,own token blocks) */) {
    if (orders.keys) {
      Tensor bits = recast<Element>(tCrP);  // of 16, whichever type P has
      for_tokens(bits, worker.part * Traits::kOwnTokenBlocks, orders.keys,
                 [&](auto v, int n, int k, int at) { p_[buffer][at] = bits(v, n, k); });
      return;
    }
    Tensor pairs = recast<uint32_t>(tCrP);  // (2,N/8,own token blocks)
    CUTE_UNROLL
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
      CUTE_UNROLL
      for (int k = 0; k < Traits::kOwnTokenBlocks; k += 2)
        *vector(buffer, n, (worker.part * Traits::kOwnTokenBlocks + k) / 2) =
            make_uint4(pairs(0, n, k), pairs(1, n, k), pairs(0, n, k + 1), pairs(1, n, k + 1));
    }
  }

  // All warps' parts of P. After a barrier of the warps.
  template <class Fragment>
  CUTE_DEVICE void load(int buffer, TokenOrders const& orders, Fragment& tCrP /* ((2,2),N/8,token blocks) */) {
    if (orders.keys) {
      Tensor bits = recast<Element>(tCrP);
      for_tokens(bits, 0, orders.values, [&](auto v, int n, int k, int at) { bits(v, n, k) = p_[buffer][at]; });
      return;
    }
    Tensor pairs = recast<uint32_t>(tCrP);  // (2,N/8,token blocks)
    CUTE_UNROLL
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
      CUTE_UNROLL
      for (int k = 0; k < Traits::kTokenBlocks; k += 2) {
        uint4 x = *vector(buffer, n, k / 2);
        pairs(0, n, k) = x.x, pairs(1, n, k) = x.y, pairs(0, n, k + 1) = x.z, pairs(1, n, k + 1) = x.w;
      }
    }
  }

  // The scales of values, a row in their order, at this warp's tokens in the order of the keys.
  CUTE_DEVICE mma::LaneScales<Traits::kOwnTokenBlocks> reorder_scales(uint8_t const* row, TokenOrders const& orders,
                                                                      int part) {
    int lane = ptx::lane_index();
    __syncwarp();  // those of the tile before have been read
    CUTE_UNROLL
    for (int position = lane; position < Traits::kTokens; position += 32)
      this->scale_of_token[part][orders.values[position]] =
          reinterpret_cast<uint16_t const*>(row)[format::scale_index(position)];
    __syncwarp();
    mma::LaneScales<Traits::kOwnTokenBlocks> scales;
    CUTE_UNROLL
    for (int i = 0; i < 2 * Traits::kOwnTokenBlocks; ++i) {
      int position = 16 * Traits::kOwnTokenBlocks * part + 8 * i + lane / 4;
      scales.of[i / 2][i % 2] = format::scale_value(this->scale_of_token[part][orders.keys[position]]);
    }
    return scales;
  }

  // A row of the work tile's q, for which there is room of its own.
  CUTE_DEVICE typename Traits::Element* query(int row) { return q_[row]; }

  // The bytes of P, for a warp's channels of O^T: the two rows of 8 that this lane accumulates, of a channel.
  CUTE_DEVICE float2& rows_of_channel(int channel) {
    static_assert(sizeof(p_) >= 16 * Traits::kOwnChannelBlocks * 8 * sizeof(float));
    return reinterpret_cast<float2*>(p_)[4 * channel + threadIdx.x % 4];
  }

  // A number of every warp for every row: of those that this lane accumulates.
  CUTE_DEVICE float& row_number(int warp, int i) {
    return number_of_row(warp, i / 2 * 8 + 2 * (threadIdx.x % 4) + i % 2);
  }
  CUTE_DEVICE float& number_of_row(int warp, int row) { return row_numbers_[warp][row]; }

 private:
  using Element = typename Traits::Element;
  static constexpr int kRowStride = Traits::kTokens + 8;  // rows in different banks
  static_assert(Traits::kOwnTokenBlocks % 2 == 0, "whole vectors");

  static constexpr int kRowsOfChannels = 16 * Traits::kOwnChannelBlocks * 8 * sizeof(float) / sizeof(Element);

  alignas(16) Element p_[2][cute::max(Traits::kN * kRowStride, kRowsOfChannels / 2)];
  alignas(16) Element q_[Traits::kN][Traits::kQueryStride];
  float row_numbers_[Traits::kWorkerWarps][Traits::kN];

  // A lane's registers of two blocks of 16 tokens.
  CUTE_DEVICE uint4* vector(int buffer, int n, int k) {
    return reinterpret_cast<uint4*>(p_[buffer]) + (n * (Traits::kTokenBlocks / 2) + k) * 32 + threadIdx.x % 32;
  }

  // Where P lies by token, for keys and values with separate token orders.
  template <class Fragment, class F>
  CUTE_DEVICE static void for_tokens(Fragment const& tCrP, int first_block, uint8_t const* order, F&& f) {
    int lane = ptx::lane_index(), row = lane / 4, column = 2 * (lane % 4);
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrP); ++k) {
      CUTE_UNROLL
      for (int v = 0; v < 4; ++v) {
        int token =
            order[16 * (first_block + k) + column + Traits::TileFormat::position_of_column(v % 2 + 8 * (v / 2))];
        CUTE_UNROLL
        for (int n = 0; n < Traits::kRowBlocks; ++n) f(v, n, k, (8 * n + row) * kRowStride + token);
      }
    }
  }
};

}  // namespace cute_kernels::attention
