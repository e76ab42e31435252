// The tile format of exactly two of four: its atom, and one place for every element, value and group.
#include <set>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "cute_kernels/format/codec/codec.hpp"
#include "cute_kernels/format/storage.hpp"

using namespace cute_kernels::format;
using Tile = TwoOfFourTile;
using Traits = cute::MMA_Traits<Tile::MmaAtom>;

template <class Layout>
void check_bijection(Layout layout, char const* name) {
  std::set<int> seen;
  for (int i = 0; i < int(cute::size(layout)); ++i) seen.insert(layout(i));
  check(int(seen.size()) == int(cute::size(layout)) && *seen.begin() == 0 && *seen.rbegin() == int(seen.size()) - 1,
        name, int(seen.size()));
}

// What PTX says of mma.m16n8k32 with sparse A, lane by lane.
void check_atom() {
  check_bijection(Traits::ALayout{}, "A is one to one");
  check_bijection(Traits::BLayout{}, "B is one to one");
  check_bijection(Traits::CLayout{}, "C is one to one");
  check_bijection(Traits::ELayout{}, "metadata is one to one");
  for (int lane = 0; lane < kLanes; ++lane) {
    int g = lane / 4, t = lane % 4;
    for (int reg = 0; reg < 4; ++reg)
      for (int i = 0; i < Tile::kGroup; ++i) {
        int row = g + 8 * (reg % 2), column = 4 * (t + 4 * (reg / 2)) + i;
        check(Traits::ALayout{}(lane, 4 * reg + i) == row + 16 * column, "A", lane, reg, i);
      }
    for (int reg = 0; reg < 4; ++reg)
      for (int half = 0; half < 2; ++half)
        check(Traits::BLayout{}(lane, 2 * reg + half) == g + 8 * (8 * reg + 2 * t + half), "B", lane, reg, half);
    for (int i = 0; i < 8; ++i) {  // lanes 4 g + 2 s and 4 g + 2 s + 1 are those of atom s
      int row = g + 8 * (i / 4), group = i % 4 + 4 * (t % 2) + 8 * (t / 2);
      check(Traits::ELayout{}(lane, i) == row + 16 * group, "metadata", lane, i);
    }
  }
}

template <Role kRole, int HeadDim>
void check_tile() {
  constexpr auto layout = Tile::element_layout<kRole, HeadDim>();
  constexpr int kGroups = Tile::lane_groups(HeadDim), kAlongK = Tile::atoms_along_k(kRole, HeadDim);
  check_bijection(layout, "every element has one place");
  std::set<std::tuple<int, int, int>> places;
  int const step = kRole == Role::kKey ? 1 : HeadDim;  // from an element to its neighbour along K
  for (int lane = 0; lane < kLanes; ++lane)
    for (int group = 0; group < kGroups; ++group) {
      int first = layout(lane, Tile::kGroup * group), token = first / HeadDim, channel = first % HeadDim;
      for (int i = 0; i < Tile::kGroup; ++i)
        check(layout(lane, Tile::kGroup * group + i) == first + i * step, "a group is four neighbours", lane, group, i);
      int m = kRole == Role::kKey ? token : channel, k = kRole == Role::kKey ? channel : token;
      int atom = group / Tile::kAtomGroups, in_atom = group % Tile::kAtomGroups;
      check(m == 16 * (atom / kAlongK) + lane / 4 + 8 * (in_atom % 2), "row of A", lane, group);
      check(k == 32 * (atom % kAlongK) + 4 * (lane % 4 + 4 * (in_atom / 2)), "column of A", lane, group);

      auto place = Tile::metadata_place(kRole, HeadDim, lane, group);
      places.insert({place.row, place.lane, place.bit});
      check(place.row >= 0 && place.row < Tile::metadata_rows(HeadDim), "row of metadata", lane, group);
      check(place.row == atom / 2, "a row of metadata serves a pair of atoms", lane, group);
      check(place.lane == 4 * (m % 8) + 2 * (atom % 2) + k / 16 % 2, "lane of metadata", lane, group);
      check(place.bit == 4 * (k / 4 % 4 + 4 * (m / 8 % 2)), "bits of metadata", lane, group);
    }
  check(int(places.size()) == kLanes * kGroups, "metadata of every group has one place", int(places.size()));
}

template <class Codec>
void check_values(int bits, int groups) {
  std::set<std::pair<int, int>> places;
  for (int group = 0; group < groups; ++group)
    for (int index = 0; index < Tile::kKept; ++index)
      places.insert({Tile::value_row<Codec>(group), Tile::first_bit<Codec>(group, index)});
  check(int(places.size()) == 2 * groups, "every value has one place", bits);
  check(places.rbegin()->first + 1 == 2 * groups * bits / 32, "rows are full", bits);
}

int main() {
  check_atom();
  check_tile<Role::kKey, 64>();
  check_tile<Role::kKey, 128>();
  check_tile<Role::kKey, 256>();
  check_tile<Role::kValue, 64>();
  check_tile<Role::kValue, 128>();
  check_tile<Role::kValue, 256>();
  check_values<Fp16Codec>(16, 64);
  check_values<Fp8Codec>(8, 64);
  check_values<Int8Codec>(8, 32);
  check_values<Int4Codec>(4, 128);
  for (int d : {64, 128, 256}) {
    check(Tile::tile_rows<Fp16Codec>(d) == d / 16 + d / 2, "rows, fp16", d);
    check(Tile::tile_rows<Fp8Codec>(d) == d / 16 + 1 + d / 4, "rows, fp8", d);
    check(Tile::tile_rows<Int4Codec>(d) == d / 16 + 1 + d / 8, "rows, int4", d);
    check(Tile::metadata_rows(d) == BitmapTile::bitmap_rows(d), "scales lie where those of the bitmap format do", d);
  }
  return report();
}
