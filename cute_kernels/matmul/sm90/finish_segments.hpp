// The end of sparse_av where a cluster has all pieces of its segments: their shares are added up out of the shared
// memory of its CTAs, in a fixed order, and the sums are written. No partials, no second kernel.
#pragma once

#include "cute_kernels/matmul/combine.hpp"
#include "cute_kernels/matmul/sm90/params.hpp"

namespace cute_kernels::matmul::sm90 {

inline constexpr int kSummands = 4;  // lanes that add up a quarter of the shares each, then write a value each

// Segments of a CTA. An item is four accumulators of a lane; the CTAs of a cluster take equal parts of a segment's.
template <class Traits>
class SegmentSums {
 public:
  // In all workers' warps, `thread` counting through them, in time: looks up where the first results belong.
  CUTE_DEVICE SegmentSums(TmaParams const& params, int thread)
      : params_(params),
        items_log2_(params.cluster.items_log2(kAtomsLog2)),
        thread_(thread),
        first_(value_of(thread / kSummands, thread % kSummands)) {}

  // With all of them: each worker has left its share at shares + worker * share_bytes.
  template <class Sync>
  CUTE_DEVICE void write(float4* shares, Sync&& sync_workers) const {
    ClusterShape const& cluster = params_.cluster;
    int summand = thread_ % kSummands, step = 32 * params_.ring.workers.divisor / kSummands;
    Value value = first_;
    if (cluster.ctas > 1)
      cute::cluster_sync();
    else
      sync_workers();
    // All lanes of a warp go on together.
    for (int i = thread_ / kSummands; i - i % kWarpItems < cluster.segments << items_log2_; i += step) {
      float4 sum = make_float4(0, 0, 0, 0);
      if (value.has_rows) {
        float4* first = shares + (i >> items_log2_) * cluster.pieces * kItems + item_of(i);  // this CTA's of the item
        cluster.for_pieces(
            summand, kSummands, first, kItems, [](float4 const& share) { return share; },
            [&](float4 const& share) { sum = sum + share; });
      }
      CUTE_UNROLL
      for (int mask = 1; mask < kSummands; mask *= 2)
        sum = sum + make_float4(__shfl_xor_sync(~0u, sum.x, mask), __shfl_xor_sync(~0u, sum.y, mask),
                                __shfl_xor_sync(~0u, sum.z, mask), __shfl_xor_sync(~0u, sum.w, mask));
      if (value.out) *value.out = Element(summand == 0 ? sum.x : summand == 1 ? sum.y : summand == 2 ? sum.z : sum.w);
      value = value_of(i + step, summand);
    }
    if (cluster.ctas == 1) return;
    cute::cluster_arrive_relaxed();  // no CTA may end while others read its shares
    cute::cluster_wait();
  }

 private:
  using Element = typename Traits::Element;
  static constexpr int kItems = size(ShareLayout<Traits>{});  // of a share
  static constexpr int kWarpItems = 32 / kSummands;
  static constexpr int kAtomsLog2 = cute::log_2(static_cast<unsigned>(kAtoms<Traits>));
  static_assert(1 << kAtomsLog2 == kAtoms<Traits>);

  TmaParams const& params_;
  int items_log2_;  // of a segment, that this CTA adds up
  int thread_;

  struct Value {
    Element* out = nullptr;  // null: not stored
    bool has_rows = false;   // of its item
  };
  Value first_;

  // In its segment, this CTA's i-th.
  CUTE_DEVICE int item_of(int i) const {
    return params_.cluster.items[(params_.cluster.rank() << items_log2_) + (i & ((1 << items_log2_) - 1))];
  }

  // One of the four of this CTA's i-th item.
  CUTE_DEVICE Value value_of(int i, int index) const {
    int segment_of_cta = i >> items_log2_;
    if (!params_.work.by_segments || segment_of_cta >= params_.cluster.segments) return {};
    int item = item_of(i), lane = item % 32, atom = item / 32, m = atom % (Traits::kM / 16),
        n = atom / (Traits::kM / 16);
    Segment segment = segment_at<Traits::kN>(params_.work, params_.cluster.first_segment() + segment_of_cta);
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
