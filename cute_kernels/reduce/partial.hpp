// Partials: what a worker has of a work tile's O^T (channels x query rows) when its split ends, and where the result of
// all of them belongs.
//
// Accumulators stay in the order of MMA fragments, a vector of four floats a lane and atom, so that they are written
// and read in whole lines; only the result is put in the order of channels.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <type_traits>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"
#include "cute_kernels/schedule/packed_queries.hpp"
#include "cute_kernels/schedule/params.hpp"

namespace cute_kernels::reduce {

using namespace cute;

// O^T in atoms of 16 channels x 8 query rows.
template <int kHeadDim_, int kRows_>
struct OutputShape {
  static constexpr int kHeadDim = kHeadDim_, kRows = kRows_;
  static constexpr int kChannelBlocks = kHeadDim / 16, kRowBlocks = kRows / 8;
  static constexpr int kAtoms = kChannelBlocks * kRowBlocks;  // atom n * kChannelBlocks + m
  static constexpr int kAtomsLog2 = cute::log_2(static_cast<unsigned>(kAtoms));
  static_assert(1 << kAtomsLog2 == kAtoms);

  using VectorLayout = Layout<Shape<_32, Int<kAtoms>>>;  // (lane, atom) -> vector
  static constexpr int kVectors = size(VectorLayout{});
};

// The vectors of a partial that hold query rows. In an atom, 8 rows wide, a quad's lanes have a pair of rows each;
// pairs of rows that do not exist are left out.
struct PartialVectors {
  int pairs_log2;  // of a quad

  CUTE_HOST_DEVICE int count_log2(int atoms_log2) const { return atoms_log2 + 3 + pairs_log2; }
  // Where the index-th of all lies: atom * 32 + lane.
  CUTE_HOST_DEVICE int operator[](int index) const {
    int quad = index >> pairs_log2, pair = index - (quad << pairs_log2);
    return 4 * quad + pair;
  }
};

// rows: of a KV head.
CUTE_HOST_DEVICE constexpr PartialVectors partial_vectors(int rows) { return {rows > 4 ? 2 : rows > 2 ? 1 : 0}; }

// Where results go.
struct Output {
  void* out;                     // (batch, query heads, query tokens, head_dim), contiguous
  float* lse;                    // (batch, query heads, query tokens), or null
  uint8_t const* channel_order;  // of the values; with order_heads, see format::SparseView
  int order_heads;
  int head_dim;
  schedule::PackedQueries packed;    // of query tokens; out and lse are then as of one row of the batch
  cutlass::FastDivmod query_tokens;  // packed: query row of a KV head -> (query head of the group, query token)
  PartialVectors vectors;
  void* partials;         // as many as place_partials says; null with splits_per_work_tile
  int summed_splits;      // of a CTA, which stores the sum of their partials; 0: it stores each
  int crossing_partials;  // where those of splits begin that end in a later work tile, with summed_splits
  DType dtype;            // of `out`
};

// Element: of `out`; uint16_t where the kernel is the same for both.
template <class Element>
CUTE_DEVICE void store_result(Output const& output, float x, Element* to) {
  if constexpr (std::is_same_v<Element, uint16_t>)
    *to = to_half_bits(x, output.dtype);
  else
    *to = Element(x);
}

// A split's partial of a work tile or, with summed_splits, a CTA's: the sum of its splits that end in the work tile.
// Splits and work tiles with common KV tiles form a staircase, so the sum of their indices names the pair.
template <class Partial>
CUTE_DEVICE Partial* partial(Output const& output, int split_or_cta, int work_tile) {
  return static_cast<Partial*>(output.partials) + split_or_cta + work_tile;
}
// With summed_splits: of the split, at most one, that has tiles of the work tile and ends in a later one.
template <class Partial>
CUTE_DEVICE Partial* crossing_partial(Output const& output, int work_tile) {
  return static_cast<Partial*>(output.partials) + output.crossing_partials + work_tile;
}

// Sets all of `output` that says where partials are, but their address. Returns how many there may be.
inline int64_t place_partials(schedule::Params const& schedule, int summed_splits, Output& output) {
  int work_tiles = schedule.work_tiles(), splits = schedule.splits.divisor * (schedule.by_work_tile ? work_tiles : 1);
  output.summed_splits = summed_splits;
  if (summed_splits == 0) return int64_t{splits} + work_tiles;
  output.crossing_partials = splits / summed_splits + work_tiles;
  return int64_t{output.crossing_partials} + work_tiles;
}

// Whether a lane's accumulators of an n8 block belong to rows that exist.
CUTE_DEVICE bool has_rows(int rows, int lane, int n) { return 8 * n + 2 * (lane % 4) < rows; }

// A warp's part of the channels, kOwnBlocks blocks of 16. vector_of(m, n): the lane's accumulators of one of its atoms.
template <class OutputShape, int kOwnBlocks, class VectorOf>
CUTE_DEVICE void store_vectors(float4* to, int rows, int part, VectorOf&& vector_of) {
  int lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int n = 0; n < OutputShape::kRowBlocks; ++n) {
    if (!has_rows(rows, lane, n)) continue;
    CUTE_UNROLL
    for (int m = 0; m < kOwnBlocks; ++m)
      to[typename OutputShape::VectorLayout{}(lane, n * OutputShape::kChannelBlocks + part * kOwnBlocks + m)] =
          vector_of(m, n);
  }
}

// Where one of a vector's four values belongs: its channel in natural order, and its row of the output.
template <class Element, class OutputShape>
class OutputElement {
 public:
  OutputElement() = default;  // there is none

  // v: of the four of `lane` in atom (m, n). What is loaded here is waited for where it is used.
  CUTE_DEVICE OutputElement(schedule::Params const& schedule, Output const& output, schedule::WorkTile const& work_tile,
                            int lane, int m, int n, int v) {
    auto thr_mma = make_tiled_mma(format::BitmapTile::MmaAtom{}).get_slice(lane);
    Tensor tCcC =
        thr_mma.partition_C(make_identity_tensor(Shape<_16, _8>{}))(_, 0, 0);  // (MMA) -> (channel_position, row)
    auto [position, row_of_block] = tCcC(v);
    int64_t order = int64_t{work_tile.sequence} * output.order_heads + work_tile.kv_head;
    channel_ = __ldg(output.channel_order + order * OutputShape::kHeadDim + 16 * m + position);
    int row = 8 * n + row_of_block;
    exists_ = row < work_tile.rows;
    row_ = (int64_t{work_tile.row} * schedule.kv_heads + work_tile.kv_head) * schedule.rows + work_tile.first_row + row;
    if (output.packed.starts) find_packed(schedule, output, work_tile, work_tile.first_row + row);
  }

  // Null if there is no such row or channel, or no LSE is wanted.
  CUTE_DEVICE Element* out(Output const& output) const {
    bool stored = exists_ && channel_ < output.head_dim;
    return stored ? static_cast<Element*>(output.out) + row_ * output.head_dim + channel_ : nullptr;
  }
  // Of the output; -1 if there is none.
  CUTE_DEVICE int64_t row() const { return exists_ ? row_ : -1; }
  CUTE_DEVICE float* lse(Output const& output) const { return exists_ && output.lse ? output.lse + row_ : nullptr; }

 private:
  int channel_ = 0;
  int64_t row_ = 0;
  bool exists_ = false;

  // row: of the KV head.
  CUTE_DEVICE void find_packed(schedule::Params const& schedule, Output const& output,
                               schedule::WorkTile const& work_tile, int row) {
    int head, token, most = output.query_tokens.divisor, group = schedule.rows / most;
    output.query_tokens(head, token, row);
    schedule::QueryTokens tokens = output.packed.of_row(work_tile.row, most);
    token = output.packed.position(tokens, token, most);
    exists_ &= token >= tokens.first;
    row_ = (int64_t{work_tile.kv_head} * group + head) * output.packed.tokens + token;
  }
};

}  // namespace cute_kernels::reduce
