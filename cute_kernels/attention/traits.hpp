// The compile-time shape of an attention kernel.
//
// A worker is a few warps that share whole tiles of keys, then of values: each takes its part of the tile's rows, so
// tokens of keys and channels of values, and they exchange the weights in between. One warp a tile would keep every
// SM's warps at work for a dozen microseconds with their last tiles.
#pragma once

#include "cute_kernels/matmul/warp/traits.hpp"

namespace cute_kernels::attention {

using namespace cute;
using format::Role;

// Plain calls are those of caches as compress_kv makes them, all of which counts (`Params::plain`). Kernels that know
// it do without what pages, lengths and orders of their own need, which is a fifth of the code; others do at least
// without the last (`Params::own_orders`).
template <class Element_, int kHeadDim_, int kN_, bool kPlain_ = false, bool kOwnOrders_ = !kPlain_>
struct Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kN = kN_;  // query rows
  static constexpr bool kPlain = kPlain_, kOwnOrders = kOwnOrders_;
  static_assert(!(kPlain && kOwnOrders));
  static constexpr int kRowBlocks = kN / 8;
  static constexpr int kTokens = format::kTileTokens;
  static constexpr int kWorkerWarps = 2;
  static constexpr int kWorkerThreads = 32 * kWorkerWarps;

  static constexpr int kQueryStride = kHeadDim + 8;  // of rows of q in shared memory: in different banks

  using Keys = matmul::Traits<Role::kKey, Element, kHeadDim, kN>;
  using Values = matmul::Traits<Role::kValue, Element, kHeadDim, kN>;
  using TiledMma = typename Keys::TiledMma;  // of one warp
  static constexpr int kTokenBlocks = kTokens / 16, kChannelBlocks = kHeadDim / 16;
  static constexpr int kOwnTokenBlocks = kTokenBlocks / kWorkerWarps, kOwnChannelBlocks = kChannelBlocks / kWorkerWarps;
  static_assert(kOwnTokenBlocks * kWorkerWarps == kTokenBlocks && kOwnChannelBlocks * kWorkerWarps == kChannelBlocks);

  // A warp's part of O^T and S^T, Q^T, P^T, and what it takes to decompress; read off the compiler's reports like those
  // of the products.
  static constexpr int kRegisters =
      (Values::kAccumulators + Keys::kAccumulators) / kWorkerWarps + Keys::kOperandB + Values::kOperandB + 56;
};

template <class T>
using PlainTraits = Traits<typename T::Element, T::kHeadDim, T::kN, true>;
template <class T>
using OneOrderTraits = Traits<typename T::Element, T::kHeadDim, T::kN, false, false>;

}  // namespace cute_kernels::attention
