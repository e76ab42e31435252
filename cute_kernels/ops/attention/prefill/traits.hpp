// The compile-time shape of the prefill kernel.
//
// Consumer warpgroups have 64 query rows each: S = Q K^T, then O += P V, with Q (but for large heads) and P in
// registers. Decoder warpgroups put K (tokens x channels) and V^T (channels x tokens) of a tile in stages of shared memory,
// both K-major and swizzled as WGMMA reads its B operand.
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "cute_kernels/mma/stored_operand.hpp"
#include "cute_kernels/ops/attention/prefill/launch.hpp"
#include "cute_kernels/ops/attention/prefill/operand_layout.hpp"

namespace cute_kernels::attention::prefill {

using namespace cute;

inline constexpr int kWarpgroupThreads = 128, kWarpgroupWarps = 4;

// Codecs: those that share a launcher (mma/stored_operand.hpp); a kernel serves all that store its elements, and learns
// which one it has when it runs. kConsumers: warpgroups of a CTA that multiply. kClusterCtas: CTAs that have the same KV
// tiles, for different query rows, each of which decodes a part of them for all.
template <class Codecs, class Element_, int kHeadDim_, int kConsumers_, int kClusterCtas_>
struct Traits {
  using Element = Element_;  // multiplies; of q, of a window and of results, which differ where a codec is narrow
  static constexpr bool kIsHalf = std::is_same_v<Element, half_t>;
  using TileFormat = std::conditional_t<
      mma::kAreTwoOfFour<Codecs>, format::TwoOfFourTile,
      std::conditional_t<mma::kAreTwoOfFourBitmap<Codecs>, format::TwoOfFourBitmapTile, format::BitmapTile>>;
  using OwnCodec = std::conditional_t<kIsHalf, format::Fp16Codec, format::Bf16Codec>;  // bit for bit
  static constexpr bool kDecodesOwn = mma::kHavePrefillOfHalf<Codecs>;
  static constexpr bool kDecodesNarrow = mma::kHavePrefillOfNarrow<Codecs, Element>;
  static_assert(kDecodesOwn || kDecodesNarrow);
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTokens = format::kTileTokens;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kClusterCtas = kClusterCtas_;
  static constexpr int kRows = kConsumers * kConsumerRows;  // query rows of a CTA
  static constexpr bool kMayMerge = kClusterCtas == 1;  // a cluster's CTAs may have the splits of a work tile instead

  // Q in registers, where there is room for it, spares shared memory a fourth of its reads.
  static constexpr bool kQueriesInRegisters = kHeadDim < 256;
  using TileShapeQK = Shape<Int<kConsumerRows>, Int<kTokens>, Int<kHeadDim>>;
  using MmaAtomQK =
      std::conditional_t<kQueriesInRegisters, decltype(GMMA::rs_op_selector<Element, Element, float, TileShapeQK>()),
                         decltype(GMMA::ss_op_selector<Element, Element, float, TileShapeQK>())>;
  using TiledMmaQK = decltype(make_tiled_mma(MmaAtomQK{}));
  using TiledMmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<kConsumerRows>, Int<kHeadDim>, Int<kTokens>>>()));
  static_assert(size(TiledMmaQK{}) == kWarpgroupThreads && size(TiledMmaPV{}) == kWarpgroupThreads);

  using SmemAtom = GMMA::Layout_K_SW128_Atom<Element>;
  using SmemLayoutQ = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kConsumerRows>, Int<kHeadDim>>{}));
  using SmemLayoutK = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kTokens>, Int<kHeadDim>>{}));
  using SmemLayoutV = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kHeadDim>, Int<kTokens>>{}));  // V^T
  // Offsets of elements from a buffer's start; the layouts above are swizzled by address.
  template <class SmemLayout>
  using Offsets = decltype(as_position_independent_swizzle_layout(SmemLayout{}));
  static_assert(finds_rows(Offsets<SmemLayoutQ>{}, kHeadDim) && finds_rows(Offsets<SmemLayoutK>{}, kHeadDim) &&
                finds_rows(Offsets<SmemLayoutV>{}, kTokens));
  static constexpr int kStageElements = kTokens * kHeadDim;
  using Order = OperandLayout<TileFormat>;
  static_assert(is_consistent<TileFormat>());

  // Whether registers suffice for S of the next tile beside P. Then a step of the pipeline has a tile's keys and the values
  // of the tile before, and one pair of barriers for both.
  static constexpr bool kOverlaps = kHeadDim < 256;
  static constexpr int kValuesLag = kOverlaps ? 1 : 0;  // steps
  static constexpr int kBarrierOperands = kOverlaps ? 2 : 1;

  // Registers decide how many decoders there are beside the consumers, whose O grows with the head_dim; shared memory how
  // many stages there are beside the blocks of all decoders.
  static constexpr int kDecoders = kHeadDim == 256 ? 3 - kConsumers : kConsumers == 1 ? 4 : 2;
  static constexpr int kStages = kHeadDim == 256 ? 5 - kConsumers : kConsumers == 1 ? 6 : 8;
  // Whether keys are released ahead of the values of their step, which come later where another CTA decodes them.
  static constexpr bool kReleasesKeysFirst = kOverlaps && kClusterCtas > 1;
  static constexpr int kReleasedOperands = kReleasesKeysFirst ? 1 : kBarrierOperands;
  static constexpr int kBarriers = kStages / kBarrierOperands;
  static_assert(kStages % kBarrierOperands == 0);
  // All stages as K, and as V^T.
  using SmemLayoutStagesK = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kTokens>, Int<kHeadDim>, Int<kStages>>{}));
  using SmemLayoutStagesV = decltype(tile_to_shape(SmemAtom{}, Shape<Int<kHeadDim>, Int<kTokens>, Int<kStages>>{}));
  static_assert(kClusterCtas == 1 || kStages % (kClusterCtas * kDecoders) == 0, "a stage is filled by one CTA");
  static_assert(kClusterCtas == 1 || kDecoders % kBarrierOperands == 0, "operands of a barrier are decoded by one CTA");
  static constexpr int kThreads = (kConsumers + kDecoders) * kWarpgroupThreads;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kDecoderRegisters = kHeadDim == 256 ? 104 : kConsumers == 1 ? 72 : 80;
  static constexpr int kConsumerRegisters = cute::min(
      240, ((kConsumers + kDecoders) * kLaunchRegisters - kDecoders * kDecoderRegisters) / kConsumers / 8 * 8);
};

}  // namespace cute_kernels::attention::prefill
