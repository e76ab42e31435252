// Results of segments from the workers that have a share of them: O^T, the largest logit and the sum of exponentials of
// every query row. The order of all sums is fixed, so results are the same bits from run to run.
//
// A worker leaves what it has of a segment in partial `piece + segment`: pieces and segments with common units form a
// staircase, so the sum names the pair. A second kernel puts a segment's partials together. Shares stay in the order of
// accumulators, four floats a lane and atom, so that they are written and read in whole lines; only the result is put
// in order of channels.
#pragma once

#include "cute_kernels/attention/softmax.hpp"
#include "cute_kernels/attention/work.hpp"
#include "cute_kernels/matmul/items.hpp"

namespace cute_kernels::attention {

template <class Traits>
inline constexpr int kAtomsM = Traits::kChannelBlocks;
template <class Traits>
inline constexpr int kAtoms = kAtomsM<Traits> * Traits::kRowBlocks;  // atom n * kAtomsM + m

template <class Traits>
inline constexpr int kAtomsLog2 = cute::log_2(static_cast<unsigned>(kAtoms<Traits>));

template <class Traits>
using ShareLayout = Layout<Shape<_32, Int<kAtoms<Traits>>>>;  // (lane, atom) -> four accumulators

template <class Traits>
struct Share {
  float4 accumulators[size(ShareLayout<Traits>{})];
  float2 softmax[Traits::kN];  // of a row: the reference of its exponentials, and their sum

  static_assert(1 << kAtomsLog2<Traits> == kAtoms<Traits>);
};

template <class Traits>
CUTE_DEVICE Share<Traits>* partial(Params const& params, int piece, int segment) {
  return static_cast<Share<Traits>*>(params.partials) + piece + segment;
}

// Whether a lane's accumulators of an n8 block belong to rows that exist.
CUTE_DEVICE bool has_rows(int rows, int lane, int n) { return 8 * n + 2 * (lane % 4) < rows; }

// A warp's part of the channels.
template <class Traits, class Fragment>
CUTE_DEVICE void leave_share(Fragment const& tCrO /* (MMA,own MMA_M,MMA_N) */, OnlineSoftmax<Traits> const& softmax,
                             int rows, int part, Share<Traits>* to) {
  int lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int n = 0; n < Traits::kRowBlocks; ++n) {
    if (!has_rows(rows, lane, n)) continue;
    CUTE_UNROLL
    for (int m = 0; m < Traits::kOwnChannelBlocks; ++m)
      to->accumulators[ShareLayout<Traits>{}(lane, n * kAtomsM<Traits> + part * Traits::kOwnChannelBlocks + m)] =
          make_float4(tCrO(0, m, n), tCrO(1, m, n), tCrO(2, m, n), tCrO(3, m, n));
    if (lane >= 4 || part > 0) continue;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      to->softmax[8 * n + 2 * lane + i] = make_float2(softmax.reference(2 * n + i), softmax.sum(2 * n + i));
    }
  }
}

// Four accumulators of a lane and the two rows that they belong to, put together share by share.
template <class Traits>
struct RunningSum {
  float reference[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};  // of the lane's rows
  float4 accumulators = make_float4(0, 0, 0, 0);

  CUTE_DEVICE RunningSum() {}

  // item: of ShareLayout
  CUTE_DEVICE RunningSum(Share<Traits> const& share, int item) : accumulators(share.accumulators[item]) {
    auto rows = *reinterpret_cast<float4 const*>(share.softmax + first_row(item));
    reference[0] = rows.x, sum[0] = rows.y, reference[1] = rows.z, sum[1] = rows.w;
  }

  CUTE_DEVICE void add(float const (&other_reference)[2], float const (&other_sum)[2], float4 other) {
    float mine[2], theirs[2];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float larger = fmaxf(reference[i], other_reference[i]);
      mine[i] = ptx::exp2_approximate(reference[i] - finite_reference(larger));
      theirs[i] = ptx::exp2_approximate(other_reference[i] - finite_reference(larger));
      reference[i] = larger;
      sum[i] = mine[i] * sum[i] + theirs[i] * other_sum[i];
    }
    float4& a = accumulators;
    a.x = mine[0] * a.x + theirs[0] * other.x, a.y = mine[1] * a.y + theirs[1] * other.y;
    a.z = mine[0] * a.z + theirs[0] * other.z, a.w = mine[1] * a.w + theirs[1] * other.w;
  }

  CUTE_DEVICE void add(RunningSum const& other) { add(other.reference, other.sum, other.accumulators); }
  CUTE_DEVICE static int first_row(int item) { return item / 32 / kAtomsM<Traits> * 8 + 2 * (item % 4); }

  // The sum of the lane whose index differs by `mask`, which takes part in the same way.
  CUTE_DEVICE void add_from_lane(int mask) {
    auto from = [&](float x) { return __shfl_xor_sync(~0u, x, mask); };
    add({from(reference[0]), from(reference[1])}, {from(sum[0]), from(sum[1])},
        make_float4(from(accumulators.x), from(accumulators.y), from(accumulators.z), from(accumulators.w)));
  }

  // Results: one of the four values, and of one of the two rows the logarithm of its sum of exponentials.
  CUTE_DEVICE float value(int v) const {
    float4 const& a = accumulators;
    float of_row = v % 2 == 0 ? (v < 2 ? a.x : a.z) : (v < 2 ? a.y : a.w);
    return of_row * (reference_of(v % 2) == -INFINITY ? 0.f : 1 / sum_of(v % 2));  // NaN stays, also in a row of NaN
  }
  CUTE_DEVICE float lse(int row) const {
    constexpr float kLn2 = 0.693147180559945f;
    return kLn2 * (reference_of(row) + log2f(sum_of(row)));
  }

 private:
  CUTE_DEVICE float reference_of(int row) const { return row == 0 ? reference[0] : reference[1]; }
  CUTE_DEVICE float sum_of(int row) const { return row == 0 ? sum[0] : sum[1]; }
};

// Where a value of an item belongs: its channel, back in its place, and row of the output.
template <class Traits>
class OutputPlace {
 public:
  using Element = typename Traits::Element;

  // v: of the four of `lane` in atom (m, n).
  CUTE_DEVICE OutputPlace(Params const& params, Segment const& segment, int lane, int m, int n, int v) {
    auto thr_mma = make_tiled_mma(format::TileMmaAtom{}).get_slice(lane);
    Tensor tCcC =
        thr_mma.partition_C(make_identity_tensor(Shape<_16, _8>{}))(_, 0, 0);  // (MMA) -> (channel_position, row)
    auto [position, row_of_block] = tCcC(v);
    channel_ = __ldg(channel_order<Traits>(params.values, segment) + 16 * m + position);
    int row = 8 * n + row_of_block;
    exists_ = row < segment.rows;
    row_ = (int64_t{segment.row} * params.keys.kv_heads + segment.kv_head) * params.rows + segment.first_row + row;
  }

  // Null if there is no such row or channel, or no LSE is wanted.
  CUTE_DEVICE Element* out(Params const& params) const {
    int head_dim = params.values.head_dim;
    return exists_ && channel_ < head_dim ? static_cast<Element*>(params.out) + row_ * head_dim + channel_ : nullptr;
  }
  CUTE_DEVICE float* lse(Params const& params) const { return exists_ && params.lse ? params.lse + row_ : nullptr; }

 private:
  int channel_;
  int64_t row_;
  bool exists_;
};

inline constexpr int kCombineThreads = 256, kCombineBlocks = 3;   // of an SM, by registers
inline constexpr int kMinSummandsLog2 = 2, kMaxSummandsLog2 = 5;  // lanes that put together an item; four store it
inline constexpr int kPartialsAtOnce = 3;                         // that a lane loads

// Grid: (segments, blocks of items). A programmatic dependent of the attention kernel: everything up to the wait runs
// while that one drains.
template <class Traits>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocks)
    combine_partials(CUTE_GRID_CONSTANT Params const params, int summands_log2) {
  extern __shared__ __align__(16) uint8_t shared[];
  WorkLine<Traits> line(params, shared);
  line.prepare();
  Segment segment = line.segment(blockIdx.x);
  auto items = matmul::items_of(params.rows);
  int summand = threadIdx.x & ((1 << summands_log2) - 1);
  int index = (blockIdx.y * kCombineThreads + threadIdx.x) >> summands_log2, item = items[index];
  int lane = item % 32, atom = item / 32, m = atom % kAtomsM<Traits>, n = atom / kAtomsM<Traits>;
  bool exists = index < 1 << items.count_log2(kAtomsLog2<Traits>) && has_rows(segment.rows, lane, n);
  OutputPlace<Traits> place(params, segment, lane, m, n, summand % 4);
  int first = line.piece_with(segment, segment.units.begin), last = line.piece_with(segment, segment.units.end - 1);
  RunningSum<Traits> sum;
  ptx::wait_for_primary();
  CUTE_NO_UNROLL
  for (int piece = first + summand; piece <= last; piece += kPartialsAtOnce << summands_log2) {
    RunningSum<Traits> shares[kPartialsAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kPartialsAtOnce; ++i) {
      int other = piece + (i << summands_log2);
      if (exists && other <= last && !line.is_empty(other))
        shares[i] = RunningSum<Traits>(*partial<Traits>(params, other, segment.index), item);
    }
    CUTE_UNROLL
    for (int i = 0; i < kPartialsAtOnce; ++i) sum.add(shares[i]);
  }
  for (int mask = 1; mask >> summands_log2 == 0; mask *= 2) sum.add_from_lane(mask);
  if (!exists || summand >= 4) return;
  if (auto* out = place.out(params)) *out = typename Traits::Element(sum.value(summand));
  if (summand < 2 && m == 0 && lane < 4)
    if (float* lse = place.lse(params)) *lse = sum.lse(summand);
}

}  // namespace cute_kernels::attention
