// The compile-time shape of a product by warpgroups (CC 9.0), for many query rows.
#pragma once

#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "cute_kernels/mma/quarter_tile.hpp"
#include "cute_kernels/mma/stored_operand.hpp"
#include "cute_kernels/pipeline/warp_roles_sm90a.hpp"

namespace cute_kernels::mma {

using namespace cute;
using pipeline::kWarpgroupThreads;
using pipeline::kWarpgroupWarps;

// A warpgroup multiplies whole tiles with WGMMA: A, the compressed tile, comes from registers, a quarter of its rows
// along M from each warp; B, N rows of q or p, lies in shared memory, swizzled. Accumulators are S^T (tokens x rows) or
// O^T (channels x rows).
template <format::Role kRole_, class Stored_, int kHeadDim_, int kN_>
struct WarpgroupTraits {
  using Stored = Stored_;
  using TileFormat = typename Stored::TileFormat;
  using Codec = typename Stored::Codec;
  using Element = typename Stored::Element;
  using Dense = typename Stored::Dense;
  static constexpr bool kHasScales = Codec::kHasScales;
  static_assert(!kHasScales, "B in shared memory is not scaled");
  static constexpr format::Role kRole = kRole_;
  static constexpr bool kIsKey = kRole == format::Role::kKey;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kN = kN_;
  static constexpr int kM = kIsKey ? format::kTileTokens : kHeadDim;
  static constexpr int kK = kIsKey ? kHeadDim : format::kTileTokens;

  using TiledMma = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kN>, _16>, GMMA::Major::K, GMMA::Major::K>()));
  static_assert(size(TiledMma{}) == kWarpgroupThreads);
  static_assert(std::is_same_v<typename TileFormat::MmaAtom, SM80_16x8x16_F32F16F16F32_TN>,
                "16 rows of WGMMA's A in registers lie in a warp as the A of m16n8k16");
  static constexpr int kBlocksM = kM / 64;  // WGMMAs side by side

  // B as WGMMA reads it: K-major rows of 128 bytes, 16-byte units swizzled. q stays for a work tile; of p one is for
  // the tile that is multiplied and one for the tile whose p is being put in order.
  using SmemLayoutB = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                             Shape<Int<kN>, Int<kK>, Int<kIsKey ? 1 : 2>>{}));  // (BLK_N,BLK_K,PIPE)

  // A warp decodes a quarter of the tile; the atoms of its words run along K first.
  using Quarter = QuarterTile<TileFormat, Codec, kHeadDim>;
  static_assert(Quarter::kParts == kWarpgroupWarps);
  static constexpr int kSteps = Quarter::kSteps, kStepWords = Quarter::kStepWords;
  static constexpr int kStepAtoms = kStepWords * Quarter::kWordAtoms;
  static constexpr int kAtomsAlongK = kK / 16;
  static_assert(kSteps * kStepAtoms == kBlocksM * kAtomsAlongK);

  // Registers of a worker's thread: accumulators, A fragments of a step, and what addresses, words and p take by the
  // compiler's reports.
  static constexpr int kAccumulators = kM * kN / kWarpgroupThreads;
  static constexpr int kRegisters = kAccumulators + 16 * kStepWords + (kIsKey ? 40 : 44);

  // Each has its q or p in shared memory: two tiles of any pattern must fit beside them all.
  static constexpr int kMostByMemory = kIsKey && kN * kHeadDim > 64 * 128 ? 3 : 4;
  static constexpr int kMostByRegisters = kRegisters <= 104 ? 4 : kRegisters <= 152 ? 3 : 2;
  static constexpr int kMaxWarpgroups = kMostByRegisters < kMostByMemory ? kMostByRegisters : kMostByMemory;
};

}  // namespace cute_kernels::mma
