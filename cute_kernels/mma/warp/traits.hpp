// The compile-time shape of a product whose tiles a warp multiplies.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "cute_kernels/mma/decoder.hpp"
#include "cute_kernels/mma/stored_operand.hpp"

namespace cute_kernels::mma {

using namespace cute;
using format::Role;

template <class Element>
using WarpMmaOp =
    std::conditional_t<std::is_same_v<Element, half_t>, SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>;

// A warp multiplies whole tiles: the compressed tile is A, N query rows are B. Accumulators are S^T (tokens x rows) or
// O^T (channels x rows). This is all of it that does not depend on the tile format.
template <Role kRole_, class Stored_, int kHeadDim_, int kN_>
struct WarpShape {
  using Stored = Stored_;
  using TileFormat = typename Stored::TileFormat;
  using Codec = typename Stored::Codec;
  using Element = typename Stored::Element;
  using Dense = typename Stored::Dense;
  using Decoder = mma::Decoder<TileFormat, Codec>;
  static constexpr bool kHasScales = Codec::kHasScales;
  static constexpr Role kRole = kRole_;
  static constexpr bool kIsKey = kRole == Role::kKey;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kN = kN_;
  static constexpr int kTokens = format::kTileTokens;

  using TiledMma = decltype(make_tiled_mma(WarpMmaOp<Element>{}));  // one warp
  static constexpr int kM = kIsKey ? kTokens : kHeadDim;
  static constexpr int kK = kIsKey ? kHeadDim : kTokens;
  static_assert(size(TiledMma{}) == 32);

  // Accumulators and B fragments are what grows. The rest, A fragments, addresses and words, was read off the
  // compiler's reports: the smallest with which nothing spills.
  static constexpr int kAccumulators = kM * kN / 32;
  static constexpr int kOperandB = kN * kK / 64;
  static constexpr int kRegisters = kAccumulators + kOperandB + (kIsKey ? 64 : kN == 8 ? 84 : 90);

  // As many warps as the register file of 65536 holds.
  static constexpr int kMaxWarps = kRegisters <= 128 ? 16 : kRegisters <= 168 ? 12 : 8;
};

template <Role kRole, class Stored, int kHeadDim, int kN, class TileFormat = typename Stored::TileFormat>
struct WarpTraits : WarpShape<kRole, Stored, kHeadDim, kN> {
  using Common = WarpShape<kRole, Stored, kHeadDim, kN>;

  // The packed layout is derived from the tile format's atom; every atom used must agree on A.
  static_assert(std::is_same_v<typename MMA_Traits<WarpMmaOp<typename Common::Element>>::ALayout,
                               typename MMA_Traits<typename TileFormat::MmaAtom>::ALayout>);

  // A k-step decodes two bitmap words of a lane side by side: 64 elements, 8 MMA atoms.
  static constexpr int kStepAtoms = 2 * TileFormat::kWordElements / 8;
  static constexpr int kSteps = TileFormat::bitmap_rows(kHeadDim) / 2;
  static constexpr int kAtomsAlongK = Common::kK / 16;
};

// Of two of four: the dense atom is that of the window, of B and of accumulators, which the sparse one shares.
template <Role kRole, class Stored, int kHeadDim, int kN>
struct SparseWarpTraits : WarpShape<kRole, Stored, kHeadDim, kN> {
  using Common = WarpShape<kRole, Stored, kHeadDim, kN>;

  using SparseTraits = MMA_Traits<format::SparseMma_16x8x32<typename Common::Element>>;
  using DenseTraits = MMA_Traits<WarpMmaOp<typename Common::Element>>;
  static_assert(
      std::is_same_v<typename SparseTraits::ALayout, typename MMA_Traits<format::TwoOfFourGroups::MmaAtom>::ALayout>);
  static_assert(std::is_same_v<typename SparseTraits::CLayout, typename DenseTraits::CLayout>);
};
template <Role kRole, class Stored, int kHeadDim, int kN>
struct WarpTraits<kRole, Stored, kHeadDim, kN, format::TwoOfFourTile> : SparseWarpTraits<kRole, Stored, kHeadDim, kN> {
};
template <Role kRole, class Stored, int kHeadDim, int kN>
struct WarpTraits<kRole, Stored, kHeadDim, kN, format::TwoOfFourBitmapTile>
    : SparseWarpTraits<kRole, Stored, kHeadDim, kN> {};

}  // namespace cute_kernels::mma
