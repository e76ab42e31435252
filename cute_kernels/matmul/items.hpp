// How a segment's results are dealt to those that put its shares together.
#pragma once

#include <cutlass/cutlass.h>

namespace cute_kernels::matmul {

// An item is four accumulators of a lane in an atom, 8 rows wide: a quad's lanes have a pair of rows each. Pairs of
// rows that do not exist are left out.
struct Items {
  int pairs_log2;  // of a quad

  CUTLASS_HOST_DEVICE int count_log2(int atoms_log2) const { return atoms_log2 + 3 + pairs_log2; }
  // Where the index-th of all lies: atom * 32 + lane.
  CUTLASS_HOST_DEVICE int operator[](int index) const {
    int quad = index >> pairs_log2, pair = index - (quad << pairs_log2);
    return 4 * quad + pair;
  }
};

// rows: of a KV head.
CUTLASS_HOST_DEVICE constexpr Items items_of(int rows) { return {rows > 4 ? 2 : rows > 2 ? 1 : 0}; }

}  // namespace cute_kernels::matmul
