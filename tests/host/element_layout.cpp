// The permutation inside a tile: one place for every element, streams decided by positions mod 8, bits of the bitmap.
#include <set>
#include <vector>

#include "check.hpp"
#include "cute_kernels/format/codec/codec.hpp"
#include "cute_kernels/format/head_dim.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"

using namespace cute_kernels::format;
using Tile = BitmapTile;

template <Role kRole, int HeadDim>
void check_element_layout() {
  constexpr auto layout = Tile::element_layout<kRole, HeadDim>();
  constexpr int kElements = Tile::lane_elements(HeadDim);
  std::vector<bool> seen(kTileTokens * HeadDim);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int e = 0; e < kElements; ++e) {
      int position = layout(lane, e);
      if (!check(position >= 0 && position < kTileTokens * HeadDim, "position lies in the tile", HeadDim, lane, e,
                 position))
        return;
      check(!seen[position], "position is met once", HeadDim, lane, e, position);
      seen[position] = true;

      int token = position / HeadDim, channel = position % HeadDim;
      Stream stream = Tile::stream_of(kRole, token % kClasses, channel % kClasses);
      check(stream.lane == lane, "stream_of names the lane", HeadDim, lane, e);
      check(stream.index == Tile::stream(e), "stream_of names the stream", HeadDim, lane, e);
      int channels = HeadDim / 16, block = e / 8;
      if (kRole == Role::kKey) {
        check(token / 16 == block / channels, "16 tokens after 16 tokens", HeadDim, lane, e);
        check(channel / 16 == block % channels, "16 channels after 16 channels within them", HeadDim, lane, e);
      } else {
        check(channel / 16 == e / Tile::kWordElements, "a word of values holds 16 channels", HeadDim, lane, e);
        check(token / 16 == block % 4, "16 tokens after 16 tokens within them", HeadDim, lane, e);
      }
      int m = kRole == Role::kKey ? token : channel, kM = kRole == Role::kKey ? kTileTokens : HeadDim;
      check(m / (kM / 4) == Tile::bitmap_word(e) / (Tile::bitmap_rows(HeadDim) / 4),
            "a quarter of the words is a quarter of M", HeadDim, lane, e);
    }
  check(Tile::bitmap_rows(HeadDim) * Tile::kWordElements == kElements, "bitmap covers the lane's elements", HeadDim);
  int const bitmap = Tile::bitmap_rows(HeadDim);
  check(Tile::max_tile_rows<Fp16Codec>(HeadDim) == bitmap + kElements / 2, "a full tile's rows, fp16", HeadDim);
  check(Tile::max_tile_rows<Bf16Codec>(HeadDim) == bitmap + kElements / 2, "a full tile's rows, bf16", HeadDim);
  check(Tile::max_tile_rows<Fp8Codec>(HeadDim) == bitmap + 1 + kElements / 4, "a full tile's rows, fp8", HeadDim);
  check(Tile::max_tile_rows<Int8Codec>(HeadDim) == bitmap + 1 + kElements / 4, "a full tile's rows, int8", HeadDim);
  check(Tile::max_tile_rows<Int4Codec>(HeadDim) == bitmap + 1 + kElements / 8, "a full tile's rows, int4", HeadDim);
}

template <int kDistance>
void check_bitmap_bits() {
  std::set<int> bits;
  for (int e = 0; e < Tile::kWordElements; ++e) bits.insert(Tile::bitmap_bit<kDistance>(e));
  check(bits.size() == Tile::kWordElements && *bits.begin() == 0 && *bits.rbegin() == Tile::kWordElements - 1,
        "bitmap_bit is one to one", kDistance);
  for (int e = 0; e < Tile::kWordElements; ++e) {
    for (int index = 0; index < Tile::kStreams; ++index)
      check((Tile::stream_bits(index) >> Tile::bitmap_bit<kDistance>(e) & 1) == (Tile::stream(e) == index),
            "stream_bits", kDistance, index, e);
    check(e / 2 % 4 == 3 || Tile::bitmap_bit<kDistance>(e + 2) == Tile::bitmap_bit<kDistance>(e) + kDistance,
          "four elements of a stream", kDistance, e);
  }
}

int main() {
  check_element_layout<Role::kKey, 64>();
  check_element_layout<Role::kKey, 128>();
  check_element_layout<Role::kKey, 256>();
  check_element_layout<Role::kValue, 64>();
  check_element_layout<Role::kValue, 128>();
  check_element_layout<Role::kValue, 256>();

  check_bitmap_bits<Fp16Codec::kBitDistance>();
  check_bitmap_bits<Fp8Codec::kBitDistance>();

  for (int d = -8; d <= kMaxHeadDim + 64; ++d) {
    int padded = padded_head_dim(d);
    bool valid = d > 0 && d % 8 == 0 && d <= kMaxHeadDim;
    check((padded != 0) == valid, "padded_head_dim knows what tiles can hold", d);
    check(!valid || (padded >= d && padded_head_dim(padded) == padded), "padded_head_dim is stable", d);
    int visited = 0;
    try {
      visit_head_dim(d, [&](auto head_dim) { visited = head_dim(); });
    } catch (std::invalid_argument const&) {
      visited = -1;
    }
    check(visited == (valid && padded == d ? d : -1), "visit_head_dim knows the padded ones and throws", d);
  }
  return report();
}
