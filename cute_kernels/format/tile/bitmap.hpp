// The bitmap tile format: the A operand of m16n8k16, element by element and lane by lane. Everything below is derived
// from the A layout of `BitmapTile::MmaAtom`; nothing else in the project states the permutation a second time.
//
//   block of a tile = bitmap rows, then a row of the tokens' scales if the codec has scales, then value rows.
//   bitmap word w of a lane covers its elements [32 w, 32 w + 32); element e has bit bitmap_bit<Codec::kBitDistance>(e).
//   element e belongs to value stream e % kStreams of its lane. Which bits of the value rows a stream has, and how many
//   values these hold, is up to the codec. Shorter streams are padded with zeros.
#pragma once

#include <cstdint>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "cute_kernels/format/tile/tile.hpp"

namespace cute_kernels::format {

// A lane's value stream.
struct Stream {
  int lane, index;
};

struct BitmapTile {
  static constexpr TileFormatId kId = TileFormatId::kBitmap;
  static constexpr char const* kName = "bitmap";

  // The lane layout of A is the same for f16 and bf16, and for one warp of a 64xNx16 WGMMA with A in registers.
  using MmaAtom = cute::SM80_16x8x16_F32F16F16F32_TN;

  // A codec with the streams that a lane has here: as many as codecs are made for.
  template <class Codec>
  using Packed = Codec;

  static constexpr int kWordElements = 32;           // elements of a lane that one bitmap word covers
  static constexpr int kStreams = 32 / kStreamBits;  // of a lane

  CUTE_HOST_DEVICE static constexpr int lane_elements(int head_dim) { return kTileTokens * head_dim / kLanes; }
  CUTE_HOST_DEVICE static constexpr int bitmap_rows(int head_dim) { return lane_elements(head_dim) / kWordElements; }
  CUTE_HOST_DEVICE static constexpr int stream_elements(int head_dim) { return lane_elements(head_dim) / kStreams; }
  CUTE_HOST_DEVICE static constexpr int stream(int element) { return element % kStreams; }

  // Rows of a tile with so many value rows, and of one without a zero.
  CUTE_HOST_DEVICE static constexpr int tile_rows(int head_dim, int value_rows) {
    return bitmap_rows(head_dim) + value_rows;
  }
  // The row of a block that has the scales of its tokens, if the codec has any.
  CUTE_HOST_DEVICE static constexpr int scale_row(int head_dim) { return bitmap_rows(head_dim); }
  // The row of a block that its values begin with, behind the bitmap and the scales of the tokens.
  template <class Codec>
  CUTE_HOST_DEVICE static constexpr int first_value_row(int head_dim) {
    return bitmap_rows(head_dim) + Codec::kScaleRows;
  }
  template <class Codec>
  CUTE_HOST_DEVICE static constexpr int max_tile_rows(int head_dim) {
    return first_value_row<Codec>(head_dim) + Codec::value_rows(stream_elements(head_dim));
  }

  // Four consecutive elements of a lane's stream s (two half2 registers) have bits that lie 8 apart with a codec of 16
  // bits: `word & (0x01010101 << (2 i + s))` is a vector of four 0/1 bytes, an operand of dp4a. With a narrow one they
  // lie 4 apart, in half a word: a product with `half >> i & 0x1111` is a selector of prmt.
  CUTE_HOST_DEVICE static constexpr int bitmap_word(int element) { return element / kWordElements; }
  template <int kBitDistance = 8>
  CUTE_HOST_DEVICE static constexpr int bitmap_bit(int element) {
    constexpr int kAtoms = kBitDistance / kStreams;  // whose bits lie side by side
    int atom = element / 8 % 4, stream = element % 2, entry = element / 2 % 4;
    return atom / kAtoms * 4 * kBitDistance + kBitDistance * entry + kStreams * (atom % kAtoms) + stream;
  }
  // Bits of a bitmap word that are of one stream, whatever the distance.
  CUTE_HOST_DEVICE static constexpr uint32_t stream_bits(int index) {
    uint32_t bits = 0;
    for (int e = 0; e < kWordElements; ++e)
      if (stream(e) == index) bits |= 1u << bitmap_bit(e);
    return bits;
  }

  // Element within an atom -> index in the atom's fragment, whose modes are column + 1, row + 8 and column + 8. The
  // last is the stream: consecutive elements are of either in turn, and those of a stream fill one register after the
  // other.
  using ElementOrder =
      cute::Layout<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::Stride<cute::_4, cute::_1, cute::_2>>;

  // Column of A within a block of 16 -> position within 16. Columns that a lane holds in one register, 2t and 2t + 1,
  // have positions 2t and 2t + 8: the same mod 8, so that they are of one stream; those of its next register along K
  // are 1 more.
  using ColumnPositions =
      cute::Layout<cute::Shape<cute::_2, cute::_4, cute::_2>, cute::Stride<cute::_8, cute::_2, cute::_1>>;
  CUTE_HOST_DEVICE static constexpr int position_of_column(int column) {
    return column / 16 * 16 + ColumnPositions{}(column % 16);
  }

  // Entry v of a lane's B fragment of 16 columns, 2t + v % 2 + 8 (v / 2), has position 8 * eight + 2t + next.
  CUTE_HOST_DEVICE static constexpr int fragment_entry(int eight, int next) { return eight + 2 * next; }
  CUTE_HOST_DEVICE static constexpr int eight_of(int entry) { return entry % 2; }
  CUTE_HOST_DEVICE static constexpr int next_of(int entry) { return entry / 2; }

  // (lane, element) -> token_position * HeadDim + channel_position. Elements run over the atom's fragment first, then
  // over the atoms along K, then over those along M: keys over blocks of 16 channels, then of 16 tokens; values over
  // the 4 blocks of 16 tokens, then over blocks of 16 channels. So a quarter of the bitmap words is, for both roles,
  // what one warp decodes when the 4 warps of a warpgroup split the tile by M, as for WGMMA with A in registers: 16
  // positions of tokens, or HeadDim / 4 neighbouring ones of channels. The streams run through the quarters in order; a
  // warp finds its start by popcounts of the words before.
  template <Role kRole, int HeadDim>
  CUTE_HOST_DEVICE static constexpr auto element_layout() {
    using namespace cute;
    constexpr bool kIsKey = kRole == Role::kKey;
    using Tokens = Int<kTileTokens>;
    using Channels = Int<HeadDim>;
    auto positions = [](auto columns) {  // column -> position
      return make_layout(ColumnPositions{}, make_layout(columns / _16{}, _16{}));
    };
    auto tile = [&] {  // (M,K) -> token_position * HeadDim + channel_position
      if constexpr (kIsKey)
        return make_layout(Layout<Tokens, Channels>{}, positions(Channels{}));
      else
        return make_layout(Layout<Channels, _1>{}, composition(Layout<Tokens, Channels>{}, positions(Tokens{})));
    }();
    auto thread_fragment = make_tiled_mma(MmaAtom{}).thrfrg_A(tile);  // ((THR_V,(THR_M,THR_K)),(FRG_V,(REST_M,REST_K)))
    auto lanes = get<0, 0>(thread_fragment);
    auto atom = get<1, 0>(thread_fragment);
    auto rest_m = get<1, 1, 0>(thread_fragment);
    auto rest_k = get<1, 1, 1>(thread_fragment);
    auto layout = make_layout(lanes, make_layout(composition(atom, ElementOrder{}), rest_k, rest_m));
    CUTE_STATIC_ASSERT_V(size<0>(layout) == Int<kLanes>{});
    CUTE_STATIC_ASSERT_V(size<1>(layout) == Int<lane_elements(HeadDim)>{});
    return layout;
  }

  // Positions mod 8 decide lane and stream, so the lengths of the streams depend only on which group (token_position
  // mod 8) a token and which class (channel_position mod 8) a channel is dealt to.
  CUTE_HOST_DEVICE static constexpr Stream stream_of(Role role, int token_group, int channel_class) {
    int row = role == Role::kKey ? token_group : channel_class;
    int column = role == Role::kKey ? channel_class : token_group;
    return {4 * row + column / 2, column % 2};
  }
};

}  // namespace cute_kernels::format
