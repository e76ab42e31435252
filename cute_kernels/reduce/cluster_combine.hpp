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

  CUTE_DEVICE ClusterCombine(schedule::Params const& schedule_params, Output const& output,
                             pipeline::ClusterShape const& cluster, schedule::Schedule<SchedulePolicy> const& schedule)
      : schedule_params_(schedule_params),
        output_(output),
        cluster_(cluster),
        schedule_(schedule),
        vectors_log2_(output.vectors.count_log2(OutputShape::kAtomsLog2)),
        own_(cluster.ctas.div((1 << vectors_log2_) + cluster.ctas.divisor - 1)) {}

  // Where one of the four values of a vector goes.
  struct Destination {
    int vector = 0;  // of VectorLayout
    OutputElement<Element, OutputShape> element;
    bool has_rows = false;    // of the vector
    bool stores_lse = false;  // of the value's row
  };

  // Of the first value that this thread of the workers' `threads` writes: looked up before other workers have arrived.
  CUTE_DEVICE Destination first_destination(int threads) const { return destination(first_vector(threads)); }

  // This worker has stored its partial.
  CUTE_DEVICE void arrive() const {
    if (cluster_.is_one_cta()) return;
    ptx::compiler_fence();  // the library's cluster barrier does not say that it orders memory
    cute::cluster_arrive();
  }

  // With all workers' threads, `threads` from thread 0 on, after `arrive`: worker w has stored its partial at
  // partials[w].
  template <class Sync>
  CUTE_DEVICE void write(Partial* partials, int threads, Destination to, Sync&& sync_workers) const {
    using Accumulator = typename Policy::template Accumulator<OutputShape>;
    int summand = threadIdx.x % kSummands, step = threads / kSummands;
    if (cluster_.is_one_cta()) {
      sync_workers();
    } else {
      cute::cluster_wait();
      ptx::compiler_fence();
    }
    // All lanes of a warp go on together.
    for (int i = first_vector(threads); i - i % kWarpVectors < cluster_.work_tiles * own_; i += step) {
      Destination next = destination(i + step);  // a load that nothing waits for meanwhile
      Accumulator sum;
      if (to.has_rows) {
        cluster_.template for_splits<kPartialsAtOnce>(
            summand, kSummands, partials + (i >> vectors_log2_) * cluster_.splits, 1,
            [&](Partial const& partial) { return Accumulator(partial, to.vector); },
            [&](Accumulator const& other) { sum.add(other); });
      }
      CUTE_UNROLL
      for (int mask = 1; mask < kSummands; mask *= 2) sum.add_from_lane(mask);
      if (auto* out = to.element.out(output_)) store_result(output_, sum.value(summand), out);
      if constexpr (Policy::kHasLse) {
        if (to.stores_lse) {
          if (float* lse = to.element.lse(output_)) *lse = sum.lse(summand % 2);
        }
      }
      to = next;
    }
    if (cluster_.is_one_cta()) return;
    ptx::compiler_fence();
    cute::cluster_arrive_relaxed();  // no CTA may end while others read its partials
    cute::cluster_wait();
  }

 private:
  static constexpr int kWarpVectors = 32 / kSummands;
  static constexpr int kPartialsAtOnce = Policy::kHasLse && OutputShape::kRows > 8 ? 2 : 4;  // as registers allow

  schedule::Params const& schedule_params_;
  Output const& output_;
  pipeline::ClusterShape const& cluster_;
  schedule::Schedule<SchedulePolicy> const& schedule_;
  int vectors_log2_;  // of a work tile
  int own_;           // that this CTA puts together; others may have fewer

  // The last warps have the first ones: where there are fewer vectors than threads, workers with a window or a longer
  // split, which come late, have none.
  CUTE_DEVICE static int first_vector(int threads) {
    int thread = threadIdx.x;
    return (threads - 32 - thread + 2 * (thread % 32)) / kSummands;
  }

  // Of the value that this thread writes of its CTA's i-th vector. What memory has of it is not waited for here.
  CUTE_DEVICE Destination destination(int i) const {
    int of_cta = i >> vectors_log2_, index = cluster_.rank() * own_ + (i & ((1 << vectors_log2_) - 1));
    if (!schedule_params_.in_cluster || i >= cluster_.work_tiles * own_ || index >> vectors_log2_ > 0) return {};
    int vector = output_.vectors[index], value = threadIdx.x % kSummands;
    int lane = vector % 32, atom = vector / 32;
    int m = atom % OutputShape::kChannelBlocks, n = atom / OutputShape::kChannelBlocks;
    schedule::WorkTile work_tile = schedule_.work_tile(cluster_.first_work_tile() + of_cta);
    return {vector,
            {schedule_params_, output_, work_tile, lane, m, n, value},
            has_rows(work_tile.rows, lane, n),
            Policy::kHasLse && value < 2 && m == 0 && lane < 4};
  }
};

}  // namespace cute_kernels::reduce
