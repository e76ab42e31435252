// The splits of a work tile, put together out of the shared memory of a cluster's CTAs, each of which has one: no partial
// results in memory, no second kernel. Weighted by log-sum-exps and in a fixed order, as reduce/merge_states.cu does.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "cute_kernels/ops/attention/prefill/storage.hpp"

namespace cute_kernels::attention::prefill {

// Of one consumer, whose rows all warps of all CTAs share out.
template <class Traits>
class SplitMerge {
 public:
  // rows: of this CTA's consumer (Storage::out_rows).
  CUTE_DEVICE SplitMerge(float* rows, cutlass::FastDivmod const& splits, int warp)
      : splits_(splits.divisor),
        rows_log2_(splits_ > 4   ? 1
                   : splits_ > 2 ? 2
                                 : 3),
        lane_(threadIdx.x % 32) {
    // Of the consumer's rows; at most 8, for there are two splits or more.
    int rows_of_warp = splits.div(kConsumerRows / kWarpgroupWarps + splits_ - 1);
    first_row_ = (cute::block_rank_in_cluster() * kWarpgroupWarps + warp) * rows_of_warp;
    count_ = max(0, min(rows_of_warp, kConsumerRows - first_row_));
    rows_ = rows + first_row_ * kStride;
    in_first_ = ptx::map_to_cta(rows_ + 4 * lane_, 0);
  }

  // The warp's rows.
  CUTE_DEVICE int first_row() const { return first_row_; }
  CUTE_DEVICE int count() const { return count_; }

  // Leaves the results in place of this CTA's. All rows of all CTAs have been written.
  CUTE_DEVICE void run() {
    CUTE_NO_UNROLL
    for (int first = 0; first < count_; first += 1 << rows_log2_) {
      weigh(first);
      CUTE_NO_UNROLL
      for (int column = 0; column < Traits::kHeadDim; column += 4 * 32) add_up(first, column);
    }
    __syncwarp();
  }

 private:
  static constexpr int kStride = Storage<Traits>::kOutStride;
  // Rows of splits that a warp has at once: 8 rows of 2 splits, 4 of up to 4, 2 of up to 8. Lane l has the weight of row
  // l % rows of split l / rows.
  static constexpr int kAtOnce = 16, kRows = kAtOnce / 2;
  static constexpr int kNowhere = -1;

  float* rows_;            // of the warp
  float const* in_first_;  // the lane's first columns of those of the cluster's first CTA
  int splits_, rows_log2_, lane_, first_row_, count_;
  float weight_;  // of the lane's row in the result
  int offset_;    // of the lane's row, from in_first_; kNowhere: the row sees no token of the split

  // From the warp's row `first` on. As merge_states.cu, whose rules for infinities and NaN are these.
  CUTE_DEVICE void weigh(int first) {
    constexpr float kLog2E = 1.44269504088896f, kLn2 = 0.693147180559945f;
    int split = lane_ >> rows_log2_, row = first + lane_ - (split << rows_log2_);
    float const* of_split = ptx::map_to_cta(rows_ + row * kStride, split);
    float lse = row < count_ && split < splits_ ? of_split[Traits::kHeadDim] : -INFINITY;
    offset_ = lse == -INFINITY ? kNowhere : static_cast<int>(of_split + 4 * lane_ - in_first_);
    float largest = lse;
    CUTE_NO_UNROLL
    for (int lanes = kAtOnce / 2; lanes >> rows_log2_ > 0; lanes /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    float zero = largest == -INFINITY ? 0 : largest;
    weight_ = ptx::exp2_approximate((lse - zero) * kLog2E);
    float weights = weight_;
    CUTE_NO_UNROLL
    for (int lanes = kAtOnce / 2; lanes >> rows_log2_ > 0; lanes /= 2) weights += __shfl_xor_sync(~0u, weights, lanes);
    bool none = largest == -INFINITY && weights == 0;
    weight_ *= none ? 0.f : ptx::reciprocal_approximate(weights);
    if (row < count_ && split == 0)
      rows_[row * kStride + Traits::kHeadDim] =
          largest == -INFINITY ? weights + largest : zero + kLn2 * ptx::log2_approximate(weights);
  }

  // Four columns of each lane, if there are so many, of the rows from `first` on. All lanes, for they have one another's
  // weights.
  CUTE_DEVICE void add_up(int first, int column) {
    bool in_row = column + 4 * lane_ < Traits::kHeadDim;
    float4 sums[kRows]{};
    CUTE_NO_UNROLL
    for (int first_lane = 0; first_lane < kAtOnce; first_lane += kRows) {
      float4 vectors[kRows];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        int offset = __shfl_sync(~0u, offset_, first_lane + i);
        vectors[i] = {};
        if (offset != kNowhere && in_row) vectors[i] = *reinterpret_cast<float4 const*>(in_first_ + column + offset);
      }
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float weight = __shfl_sync(~0u, weight_, first_lane + i);
        sums[i].x = fmaf(weight, vectors[i].x, sums[i].x), sums[i].y = fmaf(weight, vectors[i].y, sums[i].y);
        sums[i].z = fmaf(weight, vectors[i].z, sums[i].z), sums[i].w = fmaf(weight, vectors[i].w, sums[i].w);
      }
    }
    CUTE_UNROLL
    for (int rows = kRows / 2; rows > 1; rows /= 2) {
      if (rows >> rows_log2_ == 0) break;
      CUTE_UNROLL
      for (int i = 0; i < rows; ++i) {
        sums[i].x += sums[i + rows].x, sums[i].y += sums[i + rows].y;
        sums[i].z += sums[i + rows].z, sums[i].w += sums[i + rows].w;
      }
    }
    int count = min(1 << rows_log2_, count_ - first);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i)
      if (i < count && in_row) *reinterpret_cast<float4*>(rows_ + (first + i) * kStride + column + 4 * lane_) = sums[i];
  }
};

}  // namespace cute_kernels::attention::prefill
