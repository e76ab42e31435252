// The end of attention where a cluster has all pieces of its segments: their shares are put together out of the shared
// memory of its CTAs, in a fixed order, and the results are written. No partials, no second kernel.
#pragma once

#include <cooperative_groups.h>

#include <cute/arch/cluster_sm90.hpp>

#include "cute_kernels/attention/combine.hpp"
#include "cute_kernels/attention/sm90/params.hpp"

namespace cute_kernels::attention::sm90 {

inline constexpr int kSummands = 4;  // lanes that put together a quarter of the shares each, then write a value each

// Segments of a CTA. An item is four accumulators of a lane; the CTAs of a cluster take equal parts of a segment's.
template <class Traits>
class SegmentResults {
 public:
  CUTE_DEVICE SegmentResults(RingParams const& params, WorkLine<Traits::kN> const& line)
      : params_(params),
        line_(line),
        pieces_(min(params.pieces.divisor, params.workers)),
        segments_(params.workers / pieces_),
        items_(kItems / params.cluster),
        first_item_(params.cluster > 1 ? static_cast<int>(cute::block_rank_in_cluster()) * items_ : 0) {}

  // With all workers' threads: each worker has left its share.
  template <class Sync>
  CUTE_DEVICE void write(Share<Traits>* shares, Sync&& sync_workers) const {
    int summand = threadIdx.x % kSummands, step = Traits::kWorkerThreads * params_.workers / kSummands;
    bool waits = true;
    for (int i = threadIdx.x / kSummands; i < segments_ * items_ || waits; i += step) {
      Place place = place_of(i, summand);  // what takes long to look up, before the shares are there
      if (waits) {
        waits = false;
        if (params_.cluster > 1)
          cute::cluster_sync();
        else
          sync_workers();
      }
      RunningSum<Traits> sum;
      if (place.has_rows) {
        for (int cta = 0; cta < params_.cluster; ++cta) {
          Share<Traits> const* from =
              params_.cluster > 1 ? cooperative_groups::cluster_group::map_shared_rank(shares, cta) : shares;
#pragma unroll 2
          for (int piece = summand; piece < pieces_; piece += kSummands)
            sum.add(RunningSum<Traits>(from[i / items_ * pieces_ + piece], first_item_ + i % items_));
        }
      }
      CUTE_UNROLL
      for (int mask = 1; mask < kSummands; mask *= 2) sum.add_from_lane(mask);
      if (place.out) *place.out = Element(sum.value(summand));
      if (place.lse) *place.lse = sum.lse(summand % 2);
    }
    if (params_.cluster == 1) return;
    cute::cluster_arrive_relaxed();  // no CTA may end while others read its shares
    cute::cluster_wait();
  }

 private:
  using Element = typename Traits::Element;
  static constexpr int kItems = size(ShareLayout<Traits>{});  // of a segment

  RingParams const& params_;
  WorkLine<Traits::kN> const& line_;
  int pieces_;    // of a segment, in this CTA
  int segments_;  // that have pieces in this CTA
  int items_;     // of a segment, that this CTA puts together
  int first_item_;

  // Where one of the four values of this CTA's i-th item goes, null: nowhere.
  struct Place {
    Element* out = nullptr;
    float* lse = nullptr;
    bool has_rows = false;  // of the item
  };

  CUTE_DEVICE Place place_of(int i, int index) const {
    if (i >= segments_ * items_) return {};
    int item = first_item_ + i % items_, lane = item % 32, atom = item / 32;
    int m = atom % kAtomsM<Traits>, n = atom / kAtomsM<Traits>;
    Segment segment = line_.segment(blockIdx.x / params_.cluster * segments_ + i / items_);
    OutputPlace<Traits> place(params_, segment, lane, m, n, index);
    return {place.out(params_), index < 2 && m == 0 && lane < 4 ? place.lse(params_) : nullptr,
            has_rows(segment.rows, lane, n)};
  }
};

}  // namespace cute_kernels::attention::sm90
