// The end of sparse_av: O^T of a segment from the warps, and CTAs, that have a share of it. The order of every sum is
// fixed, so results are the same bits from run to run.
//
//   crossing   a warp whose piece reaches beyond the segment's end leaves its share in partial `segment`; one a segment
//   at most last       the segment a piece ends in: the CTA adds up its warps' shares and leaves them in partial
//              `segments + cta + segment` (CTAs and segments with common tiles form a staircase, so the sum names the
//              pair)
//
// A second kernel adds up a segment's partials (measured: 2 to 3 us faster than letting the last CTA to arrive do it,
// whose fence, count and loads follow one another). They stay in the order of accumulators, four floats a lane and
// atom, so that they are written and read in whole lines; only the total is put in order of channels.
#pragma once

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/matmul/tile_scheduler.hpp"
#include "cute_kernels/matmul/warp/traits.hpp"

namespace cute_kernels::matmul {

template <class Traits>
using AtomLayout = Layout<Shape<Int<Traits::kM / 16>, Int<Traits::kN / 8>>>;  // (MMA_M,MMA_N) -> atom

template <class Traits>
inline constexpr int kAtoms = size(AtomLayout<Traits>{});

template <class Traits>
using ShareLayout = Layout<Shape<_32, Int<kAtoms<Traits>>>>;  // (lane, atom) -> four accumulators

template <class Traits>
CUTE_HOST_DEVICE constexpr int share_bytes() {
  return size(ShareLayout<Traits>{}) * static_cast<int>(sizeof(float4));
}

CUTE_HOST_DEVICE constexpr int64_t max_partials(int ctas, int64_t segments) { return ctas + 2 * segments; }
CUTE_HOST_DEVICE constexpr int64_t partial_bytes(int64_t partials, int n, int head_dim) {
  return partials * n * head_dim * static_cast<int64_t>(sizeof(float));
}
CUTE_DEVICE int segments_of(Work const& work) { return work.tiles / work.tiles_per_segment.divisor; }
CUTE_DEVICE int crossing_partial(Segment const& segment) { return segment.index; }
CUTE_DEVICE int cta_partial(Work const& work, int cta, int segment) { return segments_of(work) + cta + segment; }

template <class Traits>
CUTE_DEVICE float4* partial_data(Params const& params, int index) {
  return static_cast<float4*>(params.partials) + int64_t{index} * size(ShareLayout<Traits>{});
}

// Whether a lane's accumulators of an n8 block belong to rows that exist.
CUTE_DEVICE bool has_rows(int rows, int lane, int n) { return 8 * n + 2 * (lane % 4) < rows; }

CUTE_DEVICE float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

template <class Traits, class Fragment>
CUTE_DEVICE void leave_share(Fragment const& tCrC /* (MMA,MMA_M,MMA_N) */, int rows, float4* to) {
  int lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int n = 0; n < size<2>(tCrC); ++n) {
    if (!has_rows(rows, lane, n)) continue;
    CUTE_UNROLL
    for (int m = 0; m < size<1>(tCrC); ++m)
      to[ShareLayout<Traits>{}(lane, AtomLayout<Traits>{}(m, n))] =
          make_float4(tCrC(0, m, n), tCrC(1, m, n), tCrC(2, m, n), tCrC(3, m, n));
  }
}

// CC 9.0: a warpgroup has multiplied its share of a segment; each warp leaves its quarter. Warpgroups count as CTAs.
template <class Traits, class Fragment>
CUTE_DEVICE void leave_partial(Params const& params, Segment const& segment, TileRange piece, int worker, int warp,
                               Fragment const& tCrC /* ((2,2,N/8),BLOCKS_M,1) */) {
  int lane = threadIdx.x % 32;
  bool crossing = segment.tiles.end < piece.end;
  float4* to = partial_data<Traits>(
      params, crossing ? crossing_partial(segment) : cta_partial(params.work, worker, segment.index));
  CUTE_UNROLL
  for (int n = 0; n < Traits::kN / 8; ++n) {
    if (!has_rows(segment.rows, lane, n)) continue;
    CUTE_UNROLL
    for (int m = 0; m < Traits::kBlocksM; ++m)
      to[ShareLayout<Traits>{}(lane, AtomLayout<Traits>{}(warp * Traits::kBlocksM + m, n))] =
          make_float4(tCrC(4 * n, m, 0), tCrC(4 * n + 1, m, 0), tCrC(4 * n + 2, m, 0), tCrC(4 * n + 3, m, 0));
  }
}

// Writes an atom of O^T: channels go back to their places.
template <class Traits>
CUTE_DEVICE void store_atom(Params const& params, Segment const& segment, int lane, int m, int n, float4 values) {
  using Element = typename Traits::Element;
  int head_dim = params.sparse.head_dim;
  uint8_t const* channel_order = params.sparse.channel_order + int64_t{segment.head} * Traits::kHeadDim;
  auto* out =
      static_cast<Element*>(params.out) + (int64_t{segment.head} * params.work.rows + segment.first_row) * head_dim;
  auto thr_mma = make_tiled_mma(format::TileMmaAtom{}).get_slice(lane);
  Tensor tCcC =
      thr_mma.partition_C(make_identity_tensor(Shape<_16, _8>{}))(_, 0, 0);  // (MMA) -> (channel_position, row)
  float const accumulators[4] = {values.x, values.y, values.z, values.w};
  CUTE_UNROLL
  for (int v = 0; v < 4; ++v) {
    int channel = __ldg(channel_order + 16 * m + get<0>(tCcC(v))), row = 8 * n + get<1>(tCcC(v));
    if (row < segment.rows && channel < head_dim) out[row * head_dim + channel] = Element(accumulators[v]);
  }
}

// All warps have left the shares of the segments that their pieces end in: adds up those of each run of warps that
// ended in the same one. Called by `warps` warps, thread counting through them; shares lie `stride_bytes` apart.
template <class Traits>
CUTE_DEVICE void add_up_shares(Params const& params, uint8_t const* shares, int stride_bytes, int const* last_segment,
                               int warps, int thread) {
  for (int begin = 0, end; begin < warps; begin = end) {
    int index = last_segment[begin];
    for (end = begin + 1; end < warps && last_segment[end] == index; ++end) {
    }
    Segment segment = segment_at<Traits::kN>(params.work, index);
    float4* partial = partial_data<Traits>(params, cta_partial(params.work, blockIdx.x, index));
    CUTE_NO_UNROLL
    for (int i = thread; i < size(ShareLayout<Traits>{}); i += 32 * warps) {
      if (!has_rows(segment.rows, i % 32, i / 32 / (Traits::kM / 16))) continue;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int warp = begin; warp < end; ++warp)
        sum = sum + reinterpret_cast<float4 const*>(shares + warp * stride_bytes)[i];
      partial[i] = sum;
    }
  }
}

inline constexpr int kCombineWarps = 4;

// Grid: (segments, atoms). Warp w adds up partials w, w + 4, ...; warp 0 adds up the warps. A programmatic dependent of
// sparse_av: everything up to the wait runs while that kernel drains.
template <class Traits>
__global__ void __launch_bounds__(32 * kCombineWarps)
    combine_partials(CUTE_GRID_CONSTANT Params const params, int warps_a_cta) {
  __shared__ float4 sums[kCombineWarps][32];
  Work const& work = params.work;
  Segment segment = segment_at<Traits::kN>(work, blockIdx.x);
  int atom = blockIdx.y, m = atom % (Traits::kM / 16), n = atom / (Traits::kM / 16);
  int first = piece_of_tile(work, segment.tiles.begin), last = piece_of_tile(work, segment.tiles.end - 1);
  if (8 * n >= segment.rows) return;
  bool crossing = piece_tiles(work, last).end > segment.tiles.end;
  if (crossing) --last;  // its share is apart
  int first_cta = first / warps_a_cta, end_cta = last < first ? first_cta : last / warps_a_cta + 1;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, item = ShareLayout<Traits>{}(lane, atom);
  float4 sum = make_float4(0, 0, 0, 0);
  ptx::wait_for_primary();
  if (has_rows(segment.rows, lane, n)) {
#pragma unroll 4
    for (int cta = first_cta + warp; cta < end_cta; cta += kCombineWarps)
      sum = sum + partial_data<Traits>(params, cta_partial(work, cta, segment.index))[item];
    if (crossing && warp == kCombineWarps - 1)
      sum = sum + partial_data<Traits>(params, crossing_partial(segment))[item];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0) return;
  CUTE_UNROLL
  for (int w = 1; w < kCombineWarps; ++w) sum = sum + sums[w][lane];
  store_atom<Traits>(params, segment, lane, m, n, sum);
}

}  // namespace cute_kernels::matmul
