// The end of sparse_av where a cluster has all pieces of its segments: their shares are added up out of the shared
// memory of its CTAs, in a fixed order, and the sums are written. No partials, no second kernel.
#pragma once

#include <cooperative_groups.h>

#include <cute/arch/cluster_sm90.hpp>

#include "cute_kernels/matmul/combine.hpp"
#include "cute_kernels/matmul/sm90/params.hpp"

namespace cute_kernels::matmul::sm90 {

inline constexpr int kSummands = 4;  // lanes that add up a quarter of the shares each, then write a value each

// Segments of a CTA. An item is four accumulators of a lane; the CTAs of a cluster take equal parts of a segment's.
template <class Traits>
class SegmentSums {
 public:
  CUTE_DEVICE explicit SegmentSums(TmaParams const& params)
      : params_(params),
        pieces_(min(params.work.pieces.divisor, params.ring.workers.divisor)),
        segments_(params.ring.workers.divisor / pieces_),
        items_(kItems / params.cluster),
        first_item_(params.cluster > 1 ? static_cast<int>(cute::block_rank_in_cluster()) * items_ : 0) {}

  // With all workers' warps, thread counting through them: each has left its share at shares + worker * share_bytes.
  template <class Sync>
  CUTE_DEVICE void write(float4* shares, int thread, Sync&& sync_workers) const {
    int summand = thread % kSummands, step = 32 * params_.ring.workers.divisor / kSummands;
    Value value = value_of(thread / kSummands, summand);  // what takes long to look up, before the shares are there
    if (params_.cluster > 1)
      cute::cluster_sync();
    else
      sync_workers();
    for (int i = thread / kSummands; i < segments_ * items_; i += step) {
      if (i >= step) value = value_of(i, summand);
      float4 sum = make_float4(0, 0, 0, 0);
      if (value.has_rows) {
        for (int cta = 0; cta < params_.cluster; ++cta) {
          float4 const* from =
              params_.cluster > 1 ? cooperative_groups::cluster_group::map_shared_rank(shares, cta) : shares;
          from += i / items_ * pieces_ * kItems + first_item_ + i % items_;
#pragma unroll 4
          for (int piece = summand; piece < pieces_; piece += kSummands) sum = sum + from[piece * kItems];
        }
      }
      CUTE_UNROLL
      for (int mask = 1; mask < kSummands; mask *= 2)
        sum = sum + make_float4(__shfl_xor_sync(~0u, sum.x, mask), __shfl_xor_sync(~0u, sum.y, mask),
                                __shfl_xor_sync(~0u, sum.z, mask), __shfl_xor_sync(~0u, sum.w, mask));
      if (value.out) *value.out = Element(summand == 0 ? sum.x : summand == 1 ? sum.y : summand == 2 ? sum.z : sum.w);
    }
    if (params_.cluster == 1) return;
    cute::cluster_arrive_relaxed();  // no CTA may end while others read its shares
    cute::cluster_wait();
  }

 private:
  using Element = typename Traits::Element;
  static constexpr int kItems = size(ShareLayout<Traits>{});  // of a segment

  TmaParams const& params_;
  int pieces_;    // of a segment, in this CTA
  int segments_;  // that have pieces in this CTA
  int items_;     // of a segment, that this CTA adds up
  int first_item_;

  struct Value {
    Element* out = nullptr;  // null: not stored
    bool has_rows = false;   // of its item
  };

  // One of the four of this CTA's i-th item.
  CUTE_DEVICE Value value_of(int i, int index) const {
    if (i >= segments_ * items_) return {};
    int item = first_item_ + i % items_, lane = item % 32, atom = item / 32;
    int m = atom % (Traits::kM / 16), n = atom / (Traits::kM / 16);
    Segment segment = segment_at<Traits::kN>(params_.work, blockIdx.x / params_.cluster * segments_ + i / items_);
    auto thr_mma = make_tiled_mma(format::TileMmaAtom{}).get_slice(lane);
    auto coords = thr_mma.partition_C(make_identity_tensor(Shape<_16, _8>{}))(_, 0, 0);  // (MMA)
    auto [position, row_of_block] = coords(index);
    int channel = __ldg(params_.sparse.channel_order + int64_t{segment.head} * Traits::kHeadDim + 16 * m + position);
    int row = 8 * n + row_of_block, head_dim = params_.sparse.head_dim;
    int64_t out_row = int64_t{segment.head} * params_.work.rows + segment.first_row + row;
    bool exists = row < segment.rows && channel < head_dim;
    return {exists ? static_cast<Element*>(params_.out) + out_row * head_dim + channel : nullptr,
            has_rows(segment.rows, lane, n)};
  }
};

}  // namespace cute_kernels::matmul::sm90
