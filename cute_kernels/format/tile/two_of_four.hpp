// The A operand of the sparse tensor-core instruction, register by register, and the tile format that stores it as it is.
// Everything below is derived from the layouts of `TwoOfFourGroups::MmaAtom`.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <type_traits>

#include "cute_kernels/format/tile/sparse_atom.hpp"
#include "cute_kernels/format/tile/tile.hpp"

namespace cute_kernels::format {

// What tile formats of this instruction share: of every group of 4 neighbours along K, channels of keys or tokens of
// values, two are candidates, and metadata says which two.
struct TwoOfFourGroups {
  using MmaAtom = SparseMma_16x8x32<cute::half_t>;  // that of bf16 has the same layouts

  static constexpr int kGroup = 4, kKept = 2;
  static constexpr int kAtomGroups = 4;  // of a lane in an atom, a register each
  static constexpr int kMetadataBits = 4;

  CUTE_HOST_DEVICE static constexpr int lane_groups(int head_dim) { return kTileTokens * head_dim / kLanes / kGroup; }
  CUTE_HOST_DEVICE static constexpr int metadata_rows(int head_dim) {
    return lane_groups(head_dim) * kMetadataBits / 32;
  }

  // Columns of A have the positions in which they come: neighbours stay neighbours.
  CUTE_HOST_DEVICE static constexpr int position_of_column(int column) { return column; }
  CUTE_HOST_DEVICE static constexpr int fragment_entry(int eight, int next) { return next + 2 * eight; }
  CUTE_HOST_DEVICE static constexpr int eight_of(int entry) { return entry / 2; }
  CUTE_HOST_DEVICE static constexpr int next_of(int entry) { return entry % 2; }

  // The atom's K-blocks of A, 32 columns each.
  CUTE_HOST_DEVICE static constexpr int atoms_along_k(Role role, int head_dim) {
    return (role == Role::kKey ? head_dim : kTileTokens) / 32;
  }

  // A lane's group: the row, lane and lowest bit of its metadata. Atoms come in pairs along K, which share words.
  struct MetadataPlace {
    int row, lane, bit;
  };
  CUTE_HOST_DEVICE static constexpr MetadataPlace metadata_place(Role role, int head_dim, int lane, int group) {
    using namespace cute;
    using Traits = MMA_Traits<MmaAtom>;
    int atom = group / kAtomGroups, along_k = atoms_along_k(role, head_dim);
    int element = typename Traits::ALayout{}(lane, group % kAtomGroups * kGroup);  // of A (16,32)
    int pair = element % 16 + 16 * (element / 16 / kGroup + 32 / kGroup * (atom % 2));
    int index = right_inverse(typename Traits::ELayout{})(pair);
    return {atom / along_k * (along_k / 2) + atom % along_k / 2, index % kLanes, index / kLanes * kMetadataBits};
  }

  // (lane, element) -> token_position * HeadDim + channel_position. Every 4 elements are a group; elements run over an
  // atom's 4 groups, then over the atoms along K, then over those along M.
  template <Role kRole, int HeadDim>
  CUTE_HOST_DEVICE static constexpr auto element_layout() {
    using namespace cute;
    using Tokens = Int<kTileTokens>;
    using Channels = Int<HeadDim>;
    auto tile = [] {  // (M,K) -> token_position * HeadDim + channel_position
      if constexpr (kRole == Role::kKey)
        return Layout<Shape<Tokens, Channels>, Stride<Channels, _1>>{};
      else
        return Layout<Shape<Channels, Tokens>, Stride<_1, Channels>>{};
    }();
    auto thread_fragment = make_tiled_mma(MmaAtom{}).thrfrg_A(tile);  // ((THR_V,(THR_M,THR_K)),(FRG_V,(REST_M,REST_K)))
    auto layout = make_layout(
        get<0, 0>(thread_fragment),
        make_layout(get<1, 0>(thread_fragment), get<1, 1, 1>(thread_fragment), get<1, 1, 0>(thread_fragment)));
    CUTE_STATIC_ASSERT_V(size<0>(layout) == Int<kLanes>{});
    CUTE_STATIC_ASSERT_V(size<1>(layout) == Int<kGroup * lane_groups(HeadDim)>{});
    return layout;
  }
};

template <class TileFormat>
inline constexpr bool kIsTwoOfFour = std::is_base_of_v<TwoOfFourGroups, TileFormat>;

// The tile format of exactly two of four.
//
//   block of a tile = rows of metadata, then a row of the tokens' scales if the codec has scales, then value rows.
//
// Both candidates of every group are stored; if fewer are nonzero, with zeros. So all tiles have the same size, every
// value has a place of its own, and there is nothing to look up.
struct TwoOfFourTile : TwoOfFourGroups {
  static constexpr TileFormatId kId = TileFormatId::kTwoOfFour;
  static constexpr char const* kName = "two_of_four";

  // As in BitmapTile.
  CUTE_HOST_DEVICE static constexpr int scale_row(int head_dim) { return metadata_rows(head_dim); }
  template <class Codec>
  CUTE_HOST_DEVICE static constexpr int first_value_row(int head_dim) {
    return metadata_rows(head_dim) + Codec::kScaleRows;
  }
  template <class Codec>
  CUTE_HOST_DEVICE static constexpr int tile_rows(int head_dim) {
    return first_value_row<Codec>(head_dim) + lane_groups(head_dim) * kKept * Codec::kValueBits / 32;
  }

  // Where a value of a lane's group is, in the lane's words: in the order of the registers with 16 and 8 bits. With 4 a
  // word has an atom's 8 values, the first ones of its four groups in the lower half: nibbles i and i + 4, under one
  // mask, are the halves of register i.
  template <class Codec>
  CUTE_HOST_DEVICE static constexpr int value_row(int group) {
    return group / word_groups<Codec>();
  }
  template <class Codec>
  CUTE_HOST_DEVICE static constexpr int first_bit(int group, int index) {
    constexpr int kGroups = word_groups<Codec>();
    int place = kGroups == 4 ? group % kGroups + kGroups * index : group % kGroups * kKept + index;
    return place * Codec::kValueBits;
  }

 private:
  template <class Codec>
  CUTE_HOST_DEVICE static constexpr int word_groups() {
    return 32 / (kKept * Codec::kValueBits);
  }
};

}  // namespace cute_kernels::format
