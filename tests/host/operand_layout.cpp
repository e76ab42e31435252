// The order of elements in the prefill kernel's operands: a bijection, the same for K's tokens and V's, and stores of
// 16 bytes a lane that meet no bank twice.
#include "cute_kernels/ops/attention/prefill/operand_layout.hpp"

#include <cutlass/numeric_types.h>

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <set>

#include "check.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"

using namespace cute;
using namespace cute_kernels;
using Order = attention::prefill::OperandLayout<format::BitmapTile>;

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

template <int kHeadDim>
void check_head_dim() {
  std::set<int> channels;
  for (int column = 0; column < kHeadDim; ++column) channels.insert(Order::position_of_column(column));
  check(static_cast<int>(channels.size()) == kHeadDim && *channels.rbegin() == kHeadDim - 1, "channels", kHeadDim);

  Offsets<kTokens, kHeadDim> keys;
  Offsets<kHeadDim, kTokens> values;
  for (int warp = 0; warp < kWarps; ++warp)
    for (int further : {0, 8}) {
      check(meets_no_bank_twice([&](int lane) {
              return keys(Order::row_of_token(16 * warp + lane / 4 + further), lane % 4 * Order::kUnitColumns);
            }),
            "stores of keys", kHeadDim, warp, further);
      check(meets_no_bank_twice([&](int lane) {
              int channel = kHeadDim / kWarps * warp + lane / 4 + further;
              return values(Order::row_of_channel(channel), lane % 4 * Order::kUnitColumns);
            }),
            "stores of values", kHeadDim, warp, further);
    }
}

// What a lane has of an A fragment is what the columns of its unit say: registers 0 and 2 of two atoms.
void check_units() {
  for (int column = 0; column < Order::kBlockColumns; ++column) {
    int unit = column / 8, lane = unit % 4, pair = column % 8 / 2, half = column % 2;
    int atom = 2 * (unit / 4) + pair % 2, of_atom = 2 * lane + half + 8 * (pair / 2);
    int position = format::BitmapTile::position_of_column(16 * atom + of_atom);
    check(Order::position_of_column(column) == position, "position of a column", column);
  }
}

int main() {
  check(Order::is_consistent(), "orders and their inverses");
  check_units();
  check_head_dim<64>();
  check_head_dim<128>();
  check_head_dim<256>();
  return report();
}
