// The second kernel of a call whose work tiles have several splits: puts their partials together. The order of all sums
// is fixed, so results are the same bits from run to run.
#pragma once

#include "cute_kernels/common/prefetch_params.hpp"
#include "cute_kernels/pipeline/launch.hpp"
#include "cute_kernels/reduce/partial_range.hpp"
#include "cute_kernels/reduce/policies.hpp"
#include "cute_kernels/schedule/schedule.hpp"

namespace cute_kernels::reduce {

inline constexpr int kCombineThreads = 256, kCombineBlocks = 2;   // of an SM, by registers
inline constexpr int kMinSummandsLog2 = 2, kMaxSummandsLog2 = 8;  // threads that put together a vector; four store it
inline constexpr int kPartialsAtOnce = 5;                         // that a thread loads

struct CombineParams {
  schedule::Params schedule;
  Output output;
};

// Which vector a thread puts together, and which of its summands it has. Neighbouring lanes have neighbouring vectors,
// which share a line of memory; so a vector's summands are in several lanes and, if they are many, in several warps.
class CombineThread {
 public:
  CUTE_DEVICE explicit CombineThread(int summands_log2) {
    vectors_log2_ = min(kMostVectorsLog2, kThreadsLog2 - summands_log2);
    warps_log2_ = summands_log2 + vectors_log2_ - 5;
  }

  CUTE_DEVICE int index() const {  // of all vectors of the work tile
    int warp = blockIdx.y * (kCombineThreads / 32) + threadIdx.x / 32;
    return warp >> warps_log2_ << vectors_log2_ | vector();
  }
  CUTE_DEVICE int summand() const { return warp_of_vector() << (5 - vectors_log2_) | lane_of_vector(); }
  // Of the vector's four, that the thread stores, if it does.
  CUTE_DEVICE int value() const { return lane_of_vector() % 4; }
  CUTE_DEVICE bool stores() const { return summand() < 4; }

  // What the threads of a vector have, put together: the same in all of them. With all threads of the block.
  template <class Accumulator>
  CUTE_DEVICE void add_up(Accumulator& sum) const {
    add_up_lanes(sum);
    if (warps_log2_ == 0) return;
    __shared__ __align__(16) uint8_t storage[kCombineThreads / 32 << kMostVectorsLog2][sizeof(Accumulator)];
    auto* of_warps = reinterpret_cast<Accumulator*>(storage) + vector();
    int warp = threadIdx.x / 32, first = warp - warp_of_vector();
    if (lane_of_vector() == 0) of_warps[warp << kMostVectorsLog2] = sum;
    __syncthreads();
    sum = {};
    CUTE_NO_UNROLL
    for (int i = lane_of_vector(); i < 1 << warps_log2_; i += 32 >> vectors_log2_)
      sum.add(of_warps[(first + i) << kMostVectorsLog2]);
    add_up_lanes(sum);
  }

 private:
  static constexpr int kThreadsLog2 = cute::log_2(static_cast<unsigned>(kCombineThreads)), kMostVectorsLog2 = 3;
  static_assert(kMaxSummandsLog2 <= kThreadsLog2 && kMinSummandsLog2 + kMostVectorsLog2 >= 5);

  int vectors_log2_;  // of a warp
  int warps_log2_;    // of a vector

  CUTE_DEVICE int vector() const { return threadIdx.x & ((1 << vectors_log2_) - 1); }  // of the warp's
  CUTE_DEVICE int lane_of_vector() const { return threadIdx.x % 32 >> vectors_log2_; }
  CUTE_DEVICE int warp_of_vector() const { return threadIdx.x / 32 & ((1 << warps_log2_) - 1); }

  template <class Accumulator>
  CUTE_DEVICE void add_up_lanes(Accumulator& sum) const {
    CUTE_NO_UNROLL
    for (int mask = 1 << vectors_log2_; mask < 32; mask *= 2) sum.add_from_lane(mask);
  }
};

// Grid: (work tiles, blocks of vectors). A programmatic dependent of the kernel that stores partials: everything up to
// the wait runs while that one drains.
template <class Policy, class OutputShape, class Element, class SchedulePolicy>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocks)
    combine_partials(CUTE_GRID_CONSTANT CombineParams const params, int summands_log2) {
  extern __shared__ __align__(16) uint8_t shared[];
  using Partial = typename Policy::template Partial<OutputShape>;
  using Accumulator = typename Policy::template Accumulator<OutputShape>;
  __shared__ PrefetchedParams prefetched_params;
  prefetch_params(params, prefetched_params);
  Output const& output = params.output;
  schedule::Schedule<SchedulePolicy> schedule(params.schedule, shared);
  schedule.prepare();
  schedule::WorkTile work_tile = schedule.work_tile(blockIdx.x);
  CombineThread thread(summands_log2);
  int summand = thread.summand(), index = thread.index(), vector = output.vectors[index];
  int lane = vector % 32, atom = vector / 32;
  int m = atom % OutputShape::kChannelBlocks, n = atom / OutputShape::kChannelBlocks;
  bool exists = index < 1 << output.vectors.count_log2(OutputShape::kAtomsLog2) && has_rows(work_tile.rows, lane, n);
  int value = thread.value();
  OutputElement<Element, OutputShape> element(params.schedule, output, work_tile, lane, m, n, value);
  PartialRange range(schedule, work_tile);
  if constexpr (Policy::kSumsInCta) {
    if (output.summed_splits) range.to_ctas(schedule, work_tile, output.summed_splits);
  }
  bool all_store = schedule.all_store_partials();  // looked up ahead of the wait
  Accumulator sum;
  ptx::wait_for_primary();
  if constexpr (Policy::kSumsInCta) {
    if (range.crossing && exists && summand == 0)
      sum = Accumulator(*crossing_partial<Partial>(output, work_tile.index), vector);
  }
  CUTE_NO_UNROLL
  for (int first = range.first; first <= range.last; first += kPartialsAtOnce << summands_log2) {
    auto split = [&](int i) { return first + summand + (i << summands_log2); };
    uint32_t stored = ~0u;  // a bit for each of the splits
    if (!all_store) {
      ptx::keep_branch();
      CUTE_NO_UNROLL
      for (int i = 0; i < kPartialsAtOnce; ++i) stored ^= uint32_t{!schedule.stores_partial(split(i))} << i;
    }
    Partial const* from = partial<Partial>(output, split(0), work_tile.index);
    Accumulator partials[kPartialsAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kPartialsAtOnce; ++i) {
      if (exists && split(i) <= range.last && (stored >> i & 1))
        partials[i] = Accumulator(from[i << summands_log2], vector);
    }
    CUTE_UNROLL
    for (int i = 0; i < kPartialsAtOnce; ++i) sum.add(partials[i]);
  }
  thread.add_up(sum);
  if (!exists || !thread.stores()) return;
  if (auto* out = element.out(output)) store_result(output, sum.value(value), out);
  if constexpr (Policy::kHasLse) {
    if (value < 2 && m == 0 && lane < 4)
      if (float* lse = element.lse(output)) *lse = sum.lse(value);
  }
}

template <class Policy, class OutputShape, class Element, class SchedulePolicy>
void launch_combine(schedule::Params const& schedule, Output const& output, pipeline::Config const& config,
                    int schedule_bytes, cudaStream_t stream) {
  int work_tiles = schedule.work_tiles();
  int64_t partials = (output.summed_splits ? config.ctas : config.ctas * config.workers) + work_tiles;
  int vectors_log2 = output.vectors.count_log2(OutputShape::kAtomsLog2), summands_log2 = kMinSummandsLog2;
  // As many lanes as load all partials at once, but no more than run at a time.
  int64_t at_a_time = int64_t{config.ctas} * kCombineBlocks * kCombineThreads;
  while (summands_log2 < kMaxSummandsLog2 && (int64_t{kPartialsAtOnce} * work_tiles << summands_log2) < partials &&
         int64_t{2 * work_tiles} << (vectors_log2 + summands_log2) <= at_a_time)
    ++summands_log2;
  int threads = 1 << (vectors_log2 + summands_log2);
  dim3 grid(work_tiles, (threads + kCombineThreads - 1) / kCombineThreads);
  pipeline::launch_dependent(combine_partials<Policy, OutputShape, Element, SchedulePolicy>, grid, kCombineThreads,
                             schedule_bytes, config.programmatic_launch, stream, CombineParams{schedule, output},
                             summands_log2);
}

}  // namespace cute_kernels::reduce
