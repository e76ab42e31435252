// The end of a kernel where a cluster has all splits of its work tiles: their partials are put together out of the
// shared memory of its CTAs, in a fixed order, and the results are written. No partials in memory, no second kernel.
#pragma once

#include "cute_kernels/pipeline/bulk/cluster.hpp"
#include "cute_kernels/reduce/policies.hpp"
#include "cute_kernels/schedule/schedule.hpp"

namespace cute_kernels::reduce {

inline constexpr int kSummands = 4;  // lanes that put together a quarter of the partials each, then write a value each

// Work tiles of a CTA; the CTAs of a cluster take equal parts of a work tile's vectors.
template <class Policy, class OutputShape, class Element, class SchedulePolicy>
class ClusterCombine {
 public:
  using Partial = typename Policy::template Partial<OutputShape>;
  // That a thread puts together side by side: of many rows it has several, and each waits for its loads.
  static constexpr int kVectorsAtOnce = Policy::kHasLse && OutputShape::kRows > 8 ? 2 : 1;

  CUTE_DEVICE ClusterCombine(schedule::Params const& schedule_params, Output const& output,
                             pipeline::ClusterShape const& cluster, schedule::Schedule<SchedulePolicy> const& schedule)
      : schedule_params_(schedule_params),
        output_(output),
        cluster_(cluster),
        schedule_(schedule),
        vectors_log2_(output.vectors.count_log2(OutputShape::kAtomsLog2)),
        own_(cluster.ctas.div((1 << vectors_log2_) + cluster.ctas.divisor - 1)) {}

  // Where one of the four values of a vector goes, null: nowhere.
  struct Destination {
    int vector;  // of VectorLayout
    Element* out = nullptr;
    float* lse = nullptr;
    bool has_rows = false;  // of the vector
  };

  struct Destinations {
    Destination of[kVectorsAtOnce];
  };

  // Of the first values that this thread writes, with `threads` threads: looked up before the other workers have
  // arrived.
  CUTE_DEVICE Destinations first_destinations(int threads) const {
    return destinations(threadIdx.x / kSummands, threads / kSummands);
  }

  // This worker has stored its partial.
  CUTE_DEVICE void arrive() const {
    if (cluster_.is_one_cta()) return;
    ptx::compiler_fence();  // the library's cluster barrier does not say that it orders memory
    cute::cluster_arrive();
  }

  // With all workers' threads, `threads` from thread 0 on, after `arrive`: worker w has stored its partial at
  // partials[w].
  template <class Sync>
  CUTE_DEVICE void write(Partial* partials, int threads, Destinations to, Sync&& sync_workers) const {
    using Accumulator = typename Policy::template Accumulator<OutputShape>;
    int summand = threadIdx.x % kSummands, step = threads / kSummands;
    if (cluster_.is_one_cta()) {
      sync_workers();
    } else {
      cute::cluster_wait();
      ptx::compiler_fence();
    }
    // All lanes of a warp go on together.
    for (int i = threadIdx.x / kSummands; i - i % kWarpVectors < cluster_.work_tiles * own_;
         i += kVectorsAtOnce * step) {
      Destinations next;
      if constexpr (kVectorsAtOnce == 1)
        next = destinations(i + step, step);  // a load that nothing waits for meanwhile
      else
        to = destinations(i, step);  // among other loads
      struct Sums {
        Accumulator of[kVectorsAtOnce];
      } sums;
      bool has_rows = false;
      CUTE_UNROLL
      for (Destination const& destination : to.of) has_rows |= destination.has_rows;
      if (has_rows) {
        int first = (i >> vectors_log2_) * cluster_.splits;
        cluster_.template for_splits<kPartialsAtOnce>(
            summand, kSummands, partials + first, 1,
            [&](Partial const& partial) {
              Sums loaded;
              CUTE_UNROLL
              for (int j = 0; j < kVectorsAtOnce; ++j) {
                int of_work_tile = j == 0 ? 0 : ((i + j * step) >> vectors_log2_) * cluster_.splits - first;
                if (kVectorsAtOnce == 1 || to.of[j].has_rows)
                  loaded.of[j] = Accumulator((&partial)[of_work_tile], to.of[j].vector);
              }
              return loaded;
            },
            [&](Sums const& others) {
              CUTE_UNROLL
              for (int j = 0; j < kVectorsAtOnce; ++j) sums.of[j].add(others.of[j]);
            });
      }
      CUTE_UNROLL
      for (int j = 0; j < kVectorsAtOnce; ++j) {
        Accumulator& sum = sums.of[j];
        CUTE_UNROLL
        for (int mask = 1; mask < kSummands; mask *= 2) sum.add_from_lane(mask);
        if (to.of[j].out) store_result(output_, sum.value(summand), to.of[j].out);
        if constexpr (Policy::kHasLse) {
          if (to.of[j].lse) *to.of[j].lse = sum.lse(summand % 2);
        }
      }
      if constexpr (kVectorsAtOnce == 1) to = next;
    }
    if (cluster_.is_one_cta()) return;
    ptx::compiler_fence();
    cute::cluster_arrive_relaxed();  // no CTA may end while others read its partials
    cute::cluster_wait();
  }

 private:
  static constexpr int kWarpVectors = 32 / kSummands;
  static constexpr int kPartialsAtOnce = 4 / kVectorsAtOnce;  // of each vector

  schedule::Params const& schedule_params_;
  Output const& output_;
  pipeline::ClusterShape const& cluster_;
  schedule::Schedule<SchedulePolicy> const& schedule_;
  int vectors_log2_;  // of a work tile
  int own_;           // that this CTA puts together; others may have fewer

  CUTE_DEVICE Destinations destinations(int i, int step) const {
    Destinations result;
    CUTE_UNROLL
    for (int j = 0; j < kVectorsAtOnce; ++j) result.of[j] = destination(i + j * step, threadIdx.x % kSummands);
    return result;
  }

  // One of the four values of this CTA's i-th vector.
  CUTE_DEVICE Destination destination(int i, int value) const {
    int of_cta = i >> vectors_log2_, index = cluster_.rank() * own_ + (i & ((1 << vectors_log2_) - 1));
    if (!schedule_params_.in_cluster || i >= cluster_.work_tiles * own_ || index >> vectors_log2_ > 0) return {0};
    int vector = output_.vectors[index];
    int lane = vector % 32, atom = vector / 32;
    int m = atom % OutputShape::kChannelBlocks, n = atom / OutputShape::kChannelBlocks;
    schedule::WorkTile work_tile = schedule_.work_tile(cluster_.first_work_tile() + of_cta);
    OutputElement<Element, OutputShape> element(schedule_params_, output_, work_tile, lane, m, n, value);
    bool stores_lse = Policy::kHasLse && value < 2 && m == 0 && lane < 4;
    return {vector, element.out(output_), stores_lse ? element.lse(output_) : nullptr,
            has_rows(work_tile.rows, lane, n)};
  }
};

}  // namespace cute_kernels::reduce
