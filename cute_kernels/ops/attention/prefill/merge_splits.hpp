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
  // rows: of this CTA's consumer (Storage::out_rows), all written, as are those of the other CTAs.
  CUTE_DEVICE SplitMerge(float* rows, int splits, int warp) : splits_(splits), lane_(threadIdx.x % 32) {
    int warps = kWarpgroupWarps * splits, rows_of_warp = (kConsumerRows + warps - 1) / warps;
    first_row_ = (cute::block_rank_in_cluster() * kWarpgroupWarps + warp) * rows_of_warp;
    count_ = max(0, min(rows_of_warp, kConsumerRows - first_row_));
    rows_ = rows + first_row_ * kStride;
    while (1 << lanes_log2_ < splits) ++lanes_log2_;
  }

  // The warp's rows, no more than 8.
  CUTE_DEVICE int first_row() const { return first_row_; }
  CUTE_DEVICE int count() const { return count_; }

  // Leaves the results in place of this CTA's.
  CUTE_DEVICE void run() {
    weigh();
    CUTE_NO_UNROLL
    for (int column = 0; column < Traits::kHeadDim; column += 4 * 32) add_up(column + 4 * lane_);
    __syncwarp();
  }

 private:
  static constexpr int kStride = Storage<Traits>::kOutStride;
  static constexpr int kAtOnce = 4;  // vectors that a lane loads

  float* rows_;  // of the warp
  int splits_, lanes_log2_ = 0, lane_, first_row_, count_;
  float weight_;   // in the result, of the lane's split of a row (see below)
  unsigned seen_;  // lanes whose split has tokens that the row sees

  // Lane l has split l % lanes of row l / lanes, if there are so many; lanes: a power of two. 32 suffice, as
  // ceil(64 / (4 splits)) rows show for up to 16 splits.
  CUTE_DEVICE int row_of(int lane) const { return lane >> lanes_log2_; }
  CUTE_DEVICE int split_of(int lane) const { return lane & ((1 << lanes_log2_) - 1); }
  CUTE_DEVICE uint32_t address(int lane, int column) const {
    return cute::set_block_rank(cast_smem_ptr_to_uint(rows_ + row_of(lane) * kStride + column), split_of(lane));
  }

  // As merge_states.cu, whose rules for infinities and NaN are these.
  CUTE_DEVICE void weigh() {
    constexpr float kLog2E = 1.44269504088896f, kLn2 = 0.693147180559945f;
    float lse = -INFINITY;
    if (row_of(lane_) < count_ && split_of(lane_) < splits_)
      lse = ptx::load_cluster_float(address(lane_, Traits::kHeadDim));
    float largest = lse;
    CUTE_NO_UNROLL
    for (int lanes = 1; lanes < splits_; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    float zero = largest == -INFINITY ? 0 : largest;
    weight_ = ptx::exp2_approximate((lse - zero) * kLog2E);
    float weights = weight_;
    CUTE_NO_UNROLL
    for (int lanes = 1; lanes < splits_; lanes *= 2) weights += __shfl_xor_sync(~0u, weights, lanes);
    bool none = largest == -INFINITY && weights == 0;
    weight_ *= none ? 0.f : ptx::reciprocal_approximate(weights);
    seen_ = __ballot_sync(~0u, lse != -INFINITY);
    if (row_of(lane_) < count_ && split_of(lane_) == 0)
      rows_[row_of(lane_) * kStride + Traits::kHeadDim] =
          largest == -INFINITY ? weights + largest : zero + kLn2 * ptx::log2_approximate(weights);
  }

  // Four columns of all rows, if there are so many. All lanes, for they have one another's weights.
  CUTE_DEVICE void add_up(int column) {
    float4 sum{};
    CUTE_NO_UNROLL
    for (int first = 0; first < count_ << lanes_log2_; first += kAtOnce) {
      float4 vectors[kAtOnce];
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        vectors[i] = {};
        if (column < Traits::kHeadDim && (seen_ >> (first + i) & 1))
          vectors[i] = ptx::load_cluster_float4(address(first + i, column));
      }
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        int lane = first + i;
        float weight = __shfl_sync(~0u, weight_, lane);
        sum.x = fmaf(weight, vectors[i].x, sum.x), sum.y = fmaf(weight, vectors[i].y, sum.y);
        sum.z = fmaf(weight, vectors[i].z, sum.z), sum.w = fmaf(weight, vectors[i].w, sum.w);
        if (split_of(lane + 1) != 0) continue;  // the row's last
        if (column < Traits::kHeadDim && row_of(lane) < count_)
          *reinterpret_cast<float4*>(rows_ + row_of(lane) * kStride + column) = sum;
        sum = {};
      }
    }
  }
};

}  // namespace cute_kernels::attention::prefill
