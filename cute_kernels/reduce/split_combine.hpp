// The second kernel of a call whose work tiles have several splits: puts their partials together. The order of all sums
// is fixed, so results are the same bits from run to run.
#pragma once

#include "cute_kernels/pipeline/launch.hpp"
#include "cute_kernels/reduce/partial_range.hpp"
#include "cute_kernels/reduce/policies.hpp"
#include "cute_kernels/schedule/schedule.hpp"

namespace cute_kernels::reduce {

inline constexpr int kCombineThreads = 256, kCombineBlocks = 2;   // of an SM, by registers
inline constexpr int kMinSummandsLog2 = 2, kMaxSummandsLog2 = 8;  // lanes that put together a vector; four store it
inline constexpr int kPartialsAtOnce = 5;                         // that a lane loads

struct CombineParams {
  schedule::Params schedule;
  Output output;
};

// Puts together what the warps of a vector have, each the same in all lanes: `warps` neighbouring ones of the block.
template <class Accumulator>
CUTE_DEVICE void add_up_warps(Accumulator& sum, int warps) {
  __shared__ __align__(16) uint8_t storage[kCombineThreads / 32 * sizeof(Accumulator)];
  auto* of_warp = reinterpret_cast<Accumulator*>(storage);
  int warp = threadIdx.x / 32, first = warp & ~(warps - 1);
  if (threadIdx.x % 32 == 0) of_warp[warp] = sum;
  __syncthreads();
  sum = of_warp[first];
  CUTE_NO_UNROLL
  for (int i = 1; i < warps; ++i) sum.add(of_warp[first + i]);
}

// Grid: (work tiles, blocks of vectors). A programmatic dependent of the kernel that stores partials: everything up to
// the wait runs while that one drains.
template <class Policy, class OutputShape, class Element, class SchedulePolicy>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocks)
    combine_partials(CUTE_GRID_CONSTANT CombineParams const params, int summands_log2) {
  extern __shared__ __align__(16) uint8_t shared[];
  using Partial = typename Policy::template Partial<OutputShape>;
  using Accumulator = typename Policy::template Accumulator<OutputShape>;
  Output const& output = params.output;
  schedule::Schedule<SchedulePolicy> schedule(params.schedule, shared);
  schedule.prepare();
  schedule::WorkTile work_tile = schedule.work_tile(blockIdx.x);
  int summand = threadIdx.x & ((1 << summands_log2) - 1);
  int index = (blockIdx.y * kCombineThreads + threadIdx.x) >> summands_log2, vector = output.vectors[index];
  int lane = vector % 32, atom = vector / 32;
  int m = atom % OutputShape::kChannelBlocks, n = atom / OutputShape::kChannelBlocks;
  bool exists = index < 1 << output.vectors.count_log2(OutputShape::kAtomsLog2) && has_rows(work_tile.rows, lane, n);
  OutputElement<Element, OutputShape> element(params.schedule, output, work_tile, lane, m, n, summand % 4);
  PartialRange range(schedule, work_tile);
  if constexpr (Policy::kSumsInCta) {
    if (output.summed_splits) range.to_ctas(schedule, work_tile, output.summed_splits);
  }
  Accumulator sum;
  ptx::wait_for_primary();
  if constexpr (Policy::kSumsInCta) {
    if (range.crossing && exists && summand == 0)
      sum = Accumulator(*crossing_partial<Partial>(output, work_tile.index), vector);
  }
  CUTE_NO_UNROLL
  for (int split = range.first + summand; split <= range.last; split += kPartialsAtOnce << summands_log2) {
    Accumulator partials[kPartialsAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kPartialsAtOnce; ++i) {
      int other = split + (i << summands_log2);
      if (exists && other <= range.last && schedule.stores_partial(other))
        partials[i] = Accumulator(*partial<Partial>(output, other, work_tile.index), vector);
    }
    CUTE_UNROLL
    for (int i = 0; i < kPartialsAtOnce; ++i) sum.add(partials[i]);
  }
  for (int mask = 1; mask < 32 && mask >> summands_log2 == 0; mask *= 2) sum.add_from_lane(mask);
  if (summands_log2 > 5) add_up_warps(sum, 1 << (summands_log2 - 5));
  if (!exists || summand >= 4) return;
  if (auto* out = element.out(output)) store_result(output, sum.value(summand), out);
  if constexpr (Policy::kHasLse) {
    if (summand < 2 && m == 0 && lane < 4)
      if (float* lse = element.lse(output)) *lse = sum.lse(summand);
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
