// One format serves both mainloops: rows 16 w .. 16 w + 15 of a WGMMA's A in registers lie in warp w as the m16n8k16's
// A.
#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include "check.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"

using namespace cute;
using namespace cute_kernels::format;

template <class Wgmma>
void check_wgmma() {
  using Traits = MMA_Traits<Wgmma>;
  using AtomTraits = MMA_Traits<BitmapTile::MmaAtom>;
  typename Traits::ALayout wgmma;     // (thread, value) -> row + 64 * column
  typename AtomTraits::ALayout atom;  // (lane, value) -> row + 16 * column
  constexpr int kRows = size<0>(typename Traits::Shape_MNK{}), kAtomRows = size<0>(typename AtomTraits::Shape_MNK{});
  static_assert(size<2>(typename Traits::Shape_MNK{}) == size<2>(typename AtomTraits::Shape_MNK{}));
  static_assert(decltype(size<1>(wgmma))::value == decltype(size<1>(atom))::value);
  for (int thread = 0; thread < size<0>(wgmma); ++thread)
    for (int value = 0; value < size<1>(wgmma); ++value) {
      int warp = thread / kLanes, lane = thread % kLanes;
      int row = wgmma(thread, value) % kRows, column = wgmma(thread, value) / kRows;
      int atom_row = atom(lane, value) % kAtomRows, atom_column = atom(lane, value) / kAtomRows;
      check(row == kAtomRows * warp + atom_row, "row", thread, value);
      check(column == atom_column, "column", thread, value);
    }
}

int main() {
  check_wgmma<SM90_64x8x16_F32F16F16_RS<GMMA::Major::K, GMMA::Major::K>>();
  check_wgmma<SM90_64x8x16_F32BF16BF16_RS<GMMA::Major::K, GMMA::Major::K>>();
  check_wgmma<SM90_64x64x16_F32F16F16_RS<GMMA::Major::K, GMMA::Major::K>>();
  return report();
}
