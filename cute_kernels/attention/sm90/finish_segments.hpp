// The end of attention where a cluster has all pieces of its segments: their shares are put together out of the shared
// memory of its CTAs, in a fixed order, and the results are written. No partials, no second kernel.
#pragma once

#include "cute_kernels/attention/combine.hpp"
#include "cute_kernels/attention/sm90/params.hpp"

namespace cute_kernels::attention::sm90 {

inline constexpr int kSummands = 4;  // lanes that put together a quarter of the shares each, then write a value each

// Segments of a CTA. An item is four accumulators of a lane; the CTAs of a cluster take equal parts of a segment's.
template <class Traits>
class SegmentResults {
 public:
  CUTE_DEVICE SegmentResults(RingParams const& params, WorkLine<Traits> const& line)
      : params_(params), line_(line), items_log2_(params.cluster.items_log2(kAtomsLog2<Traits>)) {}

  // With all workers' threads: each worker has left its share.
  template <class Sync>
  CUTE_DEVICE void write(Share<Traits>* shares, Sync&& sync_workers) const {
    auto const& cluster = params_.cluster;
    int summand = threadIdx.x % kSummands, step = Traits::kWorkerThreads * params_.workers / kSummands;
    if (cluster.ctas > 1) cute::cluster_arrive();
    bool waits = true;
    // All lanes of a warp go on together.
    for (int i = threadIdx.x / kSummands; i - i % kWarpItems < cluster.segments << items_log2_ || waits; i += step) {
      Place place = place_of(i, summand);  // the first while others arrive
      if (waits) {
        waits = false;
        if (cluster.ctas > 1)
          cute::cluster_wait();
        else
          sync_workers();
      }
      RunningSum<Traits> sum;
      if (place.has_rows) {
        cluster.for_pieces(
            summand, kSummands, shares + (i >> items_log2_) * cluster.pieces, 1,
            [&](Share<Traits> const& share) { return RunningSum<Traits>(share, item_of(i)); },
            [&](RunningSum<Traits> const& share) { sum.add(share); });
      }
      CUTE_UNROLL
      for (int mask = 1; mask < kSummands; mask *= 2) sum.add_from_lane(mask);
      if (place.out) *place.out = Element(sum.value(summand));
      if (place.lse) *place.lse = sum.lse(summand % 2);
    }
    if (cluster.ctas == 1) return;
    cute::cluster_arrive_relaxed();  // no CTA may end while others read its shares
    cute::cluster_wait();
  }

 private:
  using Element = typename Traits::Element;
  static constexpr int kWarpItems = 32 / kSummands;

  RingParams const& params_;
  WorkLine<Traits> const& line_;
  int items_log2_;  // of a segment, that this CTA puts together

  // Where one of the four values of this CTA's i-th item goes, null: nowhere.
  struct Place {
    Element* out = nullptr;
    float* lse = nullptr;
    bool has_rows = false;  // of the item
  };

  // In its segment, this CTA's i-th.
  CUTE_DEVICE int item_of(int i) const {
    return params_.cluster.items[(params_.cluster.rank() << items_log2_) + (i & ((1 << items_log2_) - 1))];
  }

  CUTE_DEVICE Place place_of(int i, int index) const {
    int segment_of_cta = i >> items_log2_;
    if (segment_of_cta >= params_.cluster.segments) return {};
    int item = item_of(i), lane = item % 32, atom = item / 32;
    int m = atom % kAtomsM<Traits>, n = atom / kAtomsM<Traits>;
    Segment segment = line_.segment(params_.cluster.first_segment() + segment_of_cta);
    OutputPlace<Traits> place(params_, segment, lane, m, n, index);
    return {place.out(params_), index < 2 && m == 0 && lane < 4 ? place.lse(params_) : nullptr,
            has_rows(segment.rows, lane, n)};
  }
};

}  // namespace cute_kernels::attention::sm90
