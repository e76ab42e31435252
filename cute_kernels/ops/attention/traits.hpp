// The compile-time shape of an attention kernel.
//
// A worker is a few warps that share whole tiles of keys, then of values: each takes its part of the tile's rows, so
// tokens of keys and channels of values, and they exchange P in between. With one warp a tile every SM's warps would be
// at work with their last tiles for longer. Of more than 16 query rows it is a warpgroup, each of whose warps takes a
// quarter (mma/quarter_tile.hpp) and which multiplies by WGMMA: B fragments in registers would be too many, and mma.sync
// would read them from shared memory once a warp.
#pragma once

#include "cute_kernels/mma/warp/traits.hpp"
#include "cute_kernels/mma/warpgroup/traits.hpp"
#include "cute_kernels/reduce/policies.hpp"
#include "cute_kernels/schedule/schedule.hpp"

namespace cute_kernels::attention {

using namespace cute;
using format::Role;

// Uniform calls are those of caches as compress_kv makes them, all of which counts (`Params::uniform`). Kernels that
// know it do without what pages, lengths and separate token orders need. Of other calls most do without the last
// (`Params::separate_orders`).
template <class Stored_, int kHeadDim_, int kN_, bool kUniform_ = false, bool kSeparateOrders_ = !kUniform_>
struct Traits {
  using Stored = Stored_;
  using TileFormat = typename Stored::TileFormat;
  using Codec = typename Stored::Codec;
  using Element = typename Stored::Dense;  // of q, window and results: maybe only bits
  static constexpr bool kHasScales = Codec::kHasScales, kHasNonfinite = Codec::kHasNan;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kN = kN_;                                                              // query rows
  static constexpr bool kBlocksAreEqual = std::is_same_v<TileFormat, format::TwoOfFourTile>;  // of as many rows
  static constexpr bool kUniform = kUniform_, kSeparateOrders = kSeparateOrders_;
  static_assert(!(kUniform && kSeparateOrders));
  static constexpr bool kByWarpgroup = kN_ > 16;  // products by WGMMA, whose B lies in shared memory
  // Whether `Params::zero_masked` is heeded. Pages do without, and so do kernels of one token order beside which there
  // are those of two.
  static constexpr bool kZeroesMasked =
      kHasNonfinite && !kUniform && (kSeparateOrders || kBlocksAreEqual || kByWarpgroup);
  static constexpr int kRowBlocks = kN / 8;
  static constexpr int kTokens = format::kTileTokens;
  static constexpr int kWorkerWarps = kByWarpgroup ? 4 : 2;
  static constexpr int kWorkerThreads = 32 * kWorkerWarps;

  static constexpr int kQueryStride = kHeadDim + 8;  // of rows of q in shared memory: in different banks

  using SchedulePolicy = schedule::AttentionPolicy<kN, kUniform>;
  using Schedule = schedule::Schedule<SchedulePolicy>;
  using OutputShape = reduce::OutputShape<kHeadDim, kN>;
  using Partial = reduce::LogSumExp::Partial<OutputShape>;

  using Keys = mma::WarpTraits<Role::kKey, Stored, kHeadDim, kN>;
  using Values = mma::WarpTraits<Role::kValue, Stored, kHeadDim, kN>;
  using TiledMma = typename Keys::TiledMma;  // of one warp
  static constexpr int kTokenBlocks = kTokens / 16, kChannelBlocks = kHeadDim / 16;
  static constexpr int kOwnTokenBlocks = kTokenBlocks / kWorkerWarps, kOwnChannelBlocks = kChannelBlocks / kWorkerWarps;
  static_assert(kOwnTokenBlocks * kWorkerWarps == kTokenBlocks && kOwnChannelBlocks * kWorkerWarps == kChannelBlocks);

  // A warp's part of O^T and S^T, Q^T, P^T, and what decoding takes; read off the compiler's reports like those
  // of the products.
  static constexpr int kRegisters =
      (Values::kAccumulators + Keys::kAccumulators) / kWorkerWarps + Keys::kOperandB + Values::kOperandB + 56;
};

template <class T>
using UniformTraits = Traits<typename T::Stored, T::kHeadDim, T::kN, true>;
template <class T>
using SharedOrderTraits = Traits<typename T::Stored, T::kHeadDim, T::kN, false, false>;

}  // namespace cute_kernels::attention
