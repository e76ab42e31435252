// The order of elements in the prefill kernel's operands: a bijection, the same for K's tokens and V's, and stores of
// 16 bytes a lane that meet no bank twice.
#include "cute_kernels/ops/attention/prefill/operand_layout.hpp"

#include <cutlass/numeric_types.h>

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <set>

#include "check.hpp"
#include "cute_kernels/format/codec/scales.hpp"

using namespace cute;
using namespace cute_kernels;
using attention::prefill::kUnitBytes, attention::prefill::kUnitColumns;
template <class TileFormat>
using OrderOf = attention::prefill::OperandLayout<TileFormat>;

constexpr int kTokens = format::kTileTokens, kWarps = 4;

template <int kRows, int kColumns>
using Offsets = decltype(as_position_independent_swizzle_layout(
    tile_to_shape(GMMA::Layout_K_SW128_Atom<cutlass::half_t>{}, Shape<Int<kRows>, Int<kColumns>>{})));

// Lanes 8 i .. 8 i + 7 of a warp store at once; offset: of a lane's 16 bytes, in elements of 2 bytes.
template <class OffsetOf>
bool meets_no_bank_twice(OffsetOf offset_of) {
  for (int first = 0; first < 32; first += 8) {
    std::set<int> units;
    for (int lane = first; lane < first + 8; ++lane) units.insert(offset_of(lane) / 8 % 8);
    if (units.size() != 8) return false;
  }
  return true;
}

template <class TileFormat, int kHeadDim>
void check_head_dim() {
  using Order = OrderOf<TileFormat>;
  std::set<int> channels;
  for (int column = 0; column < kHeadDim; ++column) channels.insert(Order::position_of_column(column));
  check(static_cast<int>(channels.size()) == kHeadDim && *channels.rbegin() == kHeadDim - 1, "channels", kHeadDim);

  Offsets<kTokens, kHeadDim> keys;
  Offsets<kHeadDim, kTokens> values;
  for (int warp = 0; warp < kWarps; ++warp)
    for (int further : {0, 8}) {
      auto key = [&](int lane, int column) {
        return keys(Order::row_of_token(16 * warp + Order::lane_row(lane) + further), column);
      };
      auto value = [&](int lane, int column) {
        int channel = kHeadDim / kWarps * warp + Order::lane_row(lane) + further;
        return values(Order::row_of_channel(channel), column);
      };
      check(meets_no_bank_twice([&](int lane) { return key(lane, Order::lane_column(lane)); }), "stores of keys",
            kHeadDim, warp, further);
      check(meets_no_bank_twice([&](int lane) { return value(lane, Order::lane_column(lane)); }), "stores of values",
            kHeadDim, warp, further);
      for (int lane = 0; lane < 32; ++lane) {
        int first = Order::lane_column(lane), second = first + Order::kUnitsApart * kUnitColumns;
        int swap = Order::kUnitsApart * kUnitBytes / 2;  // elements
        check((key(lane, first) ^ swap) == key(lane, second), "second units of keys", kHeadDim, lane);
        check((value(lane, first) ^ swap) == value(lane, second), "second units of values", kHeadDim, lane);
      }
    }
}

// A warp's units are all of a block of 16 rows x 64 columns; positions, and indices of scales, of a lane's columns add up.
template <class TileFormat>
void check_lanes() {
  using Order = OrderOf<TileFormat>;
  std::set<int> elements;
  for (int lane = 0; lane < 32; ++lane)
    for (int unit = 0; unit < 2; ++unit)
      for (int i = 0; i < kUnitColumns; ++i) {
        int first = Order::lane_column(lane), distance = Order::kUnitsApart * kUnitColumns * unit + i;
        int position = Order::position_of_column(first + distance);
        elements.insert(64 * Order::lane_row(lane) + first + distance);
        check(Order::position_of_column(first) + Order::position_of_column(distance) == position, "positions", lane, i);
        check(format::scale_index(Order::position_of_column(first)) +
                      format::scale_index(Order::position_of_column(distance)) ==
                  format::scale_index(position),
              "indices of scales", lane, i);
      }
  check(elements.size() == 8 * 64, "units");
  for (int pair = 0; pair < 8; pair += 2)
    for (int column = 0; column < kTokens; column += 8)
      for (int i = 0; i < 2; ++i)
        check(Order::position_of_column(pair) + Order::position_of_column(column + i) ==
                  Order::position_of_column(column + pair + i),
              "positions of pairs", pair, column);
}

// What a lane has of an A fragment is what the columns of its unit say: registers 0 and 2 of two atoms.
void check_bitmap_units() {
  using Order = OrderOf<format::BitmapTile>;
  for (int column = 0; column < Order::kBlockColumns; ++column) {
    int unit = column / 8, lane = unit % 4, pair = column % 8 / 2, half = column % 2;
    int atom = 2 * (unit / 4) + pair % 2, of_atom = 2 * lane + half + 8 * (pair / 2);
    int position = format::BitmapTile::position_of_column(16 * atom + of_atom);
    check(Order::position_of_column(column) == position, "position of a column", column);
  }
}

// And of the sparse instruction: registers 0 and 2 of one atom, groups of four neighbours.
void check_slot_units() {
  using TileFormat = format::TwoOfFourBitmapTile;
  constexpr int kHeadDim = 64;
  auto layout = TileFormat::element_layout<format::Role::kKey, kHeadDim>();
  for (int column = 0; column < kHeadDim; ++column) {
    int unit = column / 8, lane = unit % 4, pair = column % 8 / 2, element = pair / 2 + 2 * (column % 2);
    int group = TileFormat::kAtomGroups * (unit / 4) + 2 * (pair % 2);
    int position = layout(lane, TileFormat::kGroup * group + element) % kHeadDim;
    check(OrderOf<TileFormat>::position_of_column(column) == position, "position of a slot's column", column);
    auto place = TileFormat::metadata_place(format::Role::kKey, kHeadDim, lane, group);
    check(place.row == 0 && place.lane == 2 * (unit / 4) + pair % 2 && place.bit == 4 * lane, "metadata", column);
  }
}

template <class TileFormat>
void check_format() {
  check(attention::prefill::is_consistent<TileFormat>(), "orders and their inverses");
  check_lanes<TileFormat>();
  check_head_dim<TileFormat, 64>();
  check_head_dim<TileFormat, 128>();
  check_head_dim<TileFormat, 256>();
}

int main() {
  check_bitmap_units();
  check_slot_units();
  check_format<format::BitmapTile>();
  check_format<format::TwoOfFourTile>();
  check_format<format::TwoOfFourBitmapTile>();
  return report();
}
