// As cluster_combine.hpp, of attention with many query rows: what a split weighs in a row is worked out once, not again
// for every vector of the row.
#pragma once

#include "cute_kernels/pipeline/bulk/cluster.hpp"
#include "cute_kernels/reduce/policies.hpp"
#include "cute_kernels/schedule/schedule.hpp"

namespace cute_kernels::reduce {

// kMaxSplits: of a work tile.
template <class OutputShape, class Element, class SchedulePolicy, int kMaxSplits>
class ClusterRows {
 public:
  using Partial = LogSumExp::Partial<OutputShape>;

  // Of the work tile that is put together, in shared memory of all workers.
  struct Tables {
    float weights[kMaxSplits][OutputShape::kRows];  // of the splits' vectors in the result
    int64_t out_rows[OutputShape::kRows];           // of the output; -1: there is no such row
    uint8_t channels[OutputShape::kHeadDim];        // by position
  };

  CUTE_DEVICE ClusterRows(schedule::Params const& schedule_params, Output const& output,
                          pipeline::ClusterShape const& cluster, schedule::Schedule<SchedulePolicy> const& schedule)
      : schedule_params_(schedule_params), output_(output), cluster_(cluster), schedule_(schedule) {}

  // This worker has stored its partial.
  CUTE_DEVICE void arrive() const {
    if (cluster_.is_one_cta()) return;
    ptx::compiler_fence();  // the library's cluster barrier does not say that it orders memory
    cute::cluster_arrive();
  }

  // With all workers' threads, `threads` from thread 0 on, after `arrive`: worker w has stored its partial at
  // partials[w]. No worker needs what was in the tables.
  template <class Sync>
  CUTE_DEVICE void write(Partial* partials, int threads, Tables& tables, Sync&& sync_workers) const {
    CUTE_NO_UNROLL
    for (int of_cta = 0; of_cta < cluster_.work_tiles; ++of_cta) {
      if (of_cta > 0) sync_workers();  // the tables have been read
      find(schedule_.work_tile(cluster_.first_work_tile() + of_cta), threads, tables);
      if (of_cta == 0 && !cluster_.is_one_cta()) {
        cute::cluster_wait();
        ptx::compiler_fence();
      }
      sync_workers();
      Partial* first = partials + of_cta * cluster_.splits;
      weigh(first, threads, tables);
      sync_workers();
      put_together(first, threads, tables);
    }
    if (cluster_.is_one_cta()) return;
    ptx::compiler_fence();
    cute::cluster_arrive_relaxed();  // no CTA may end while others read its partials
    cute::cluster_wait();
  }

 private:
  static_assert(OutputShape::kRows <= OutputShape::kHeadDim);
  static constexpr int kRowLanes = 4;                             // that look at a row's splits
  static constexpr int kMaxSummandsLog2 = 2, kVectorsAtOnce = 4;  // lanes that put a vector together; loads of each

  schedule::Params const& schedule_params_;
  Output const& output_;
  pipeline::ClusterShape const& cluster_;
  schedule::Schedule<SchedulePolicy> const& schedule_;

  CUTE_DEVICE int splits() const { return cluster_.splits * cluster_.ctas.divisor; }

  // Where results go.
  CUTE_DEVICE void find(schedule::WorkTile const& work_tile, int threads, Tables& tables) const {
    int64_t order = int64_t{work_tile.sequence} * output_.order_heads + work_tile.kv_head;
    CUTE_NO_UNROLL
    for (int i = threadIdx.x; i < OutputShape::kHeadDim; i += threads) {
      tables.channels[i] = __ldg(output_.channel_order + order * OutputShape::kHeadDim + i);
      if (i >= OutputShape::kRows) continue;
      int lane = i % 8 / 2, n = i / 8;  // that have the row in an accumulator
      tables.out_rows[i] =
          OutputElement<Element, OutputShape>(schedule_params_, output_, work_tile, lane, 0, n, i % 2).row();
    }
  }

  // Also writes log-sum-exps.
  CUTE_DEVICE void weigh(Partial* first, int threads, Tables& tables) const {
    static_assert(kRowLanes * OutputShape::kRows % 32 == 0, "all lanes of a warp go on together");
    CUTE_NO_UNROLL
    for (int i = threadIdx.x; i < kRowLanes * OutputShape::kRows; i += threads) {
      int row = i / kRowLanes;
      float row_max = -INFINITY, row_sum = 0;
      auto add = [&](float other_max, float other_sum) {
        float larger = fmaxf(row_max, other_max), base = finite_max(larger);
        row_sum = row_sum * ptx::exp2_approximate(row_max - base) + other_sum * ptx::exp2_approximate(other_max - base);
        row_max = larger;
      };
      auto for_splits = [&](auto&& f) {
        CUTE_NO_UNROLL
        for (int split = i % kRowLanes; split < splits(); split += kRowLanes) f(split, tables.weights[split][row]);
      };
      for_splits([&](int split, float& kept) {
        float2 of_split = cluster_.split(first, 1, split)->rows[row];
        kept = of_split.x;
        add(of_split.x, of_split.y);
      });
      CUTE_UNROLL
      for (int mask = 1; mask < kRowLanes; mask *= 2)
        add(__shfl_xor_sync(~0u, row_max, mask), __shfl_xor_sync(~0u, row_sum, mask));
      float base = finite_max(row_max), of_all = row_max == -INFINITY ? 0.f : 1 / row_sum;
      for_splits([&](int, float& kept) { kept = of_all * ptx::exp2_approximate(kept - base); });
      constexpr float kLn2 = 0.693147180559945f;
      int64_t out_row = tables.out_rows[row];
      if (output_.lse && i % kRowLanes == 0 && cluster_.rank() == 0 && out_row >= 0)
        output_.lse[out_row] = kLn2 * (row_max + log2f(row_sum));
    }
  }

  // The CTAs of a cluster take equal parts of the vectors.
  CUTE_DEVICE void put_together(Partial* first, int threads, Tables const& tables) const {
    int vectors = 1 << output_.vectors.count_log2(OutputShape::kAtomsLog2);
    int own = cluster_.ctas.div(vectors + cluster_.ctas.divisor - 1), begin = cluster_.rank() * own;
    own = min(own, vectors - begin);
    int summands_log2 = 0;
    while (summands_log2 < kMaxSummandsLog2 && 2 * own << summands_log2 <= threads) ++summands_log2;
    int step = 1 << summands_log2, summand = threadIdx.x & (step - 1);
    int warp_vectors = 32 >> summands_log2;
    // All lanes of a warp go on together.
    CUTE_NO_UNROLL
    for (int i = threadIdx.x >> summands_log2; i - i % warp_vectors < own; i += threads >> summands_log2) {
      int vector = output_.vectors[begin + i], lane = vector % 32, atom = vector / 32;
      int m = atom % OutputShape::kChannelBlocks, row = atom / OutputShape::kChannelBlocks * 8 + 2 * (lane % 4);
      int end = i < own ? splits() : 0;
      float4 sum = make_float4(0, 0, 0, 0);
      CUTE_NO_UNROLL
      for (int split = summand; split < end; split += kVectorsAtOnce * step) {
        float4 x[kVectorsAtOnce];
        CUTE_UNROLL
        for (int j = 0; j < kVectorsAtOnce; ++j)
          if (split + j * step < end) x[j] = cluster_.split(first, 1, split + j * step)->vectors[vector];
        CUTE_UNROLL
        for (int j = 0; j < kVectorsAtOnce; ++j) {
          if (split + j * step >= end) break;
          float2 weight = *reinterpret_cast<float2 const*>(&tables.weights[split + j * step][row]);
          sum.x += weight.x * x[j].x, sum.y += weight.y * x[j].y;
          sum.z += weight.x * x[j].z, sum.w += weight.y * x[j].w;
        }
      }
      for (int mask = 1; mask < step; mask *= 2) {
        float4 other = shuffle_xor(sum, mask);
        sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
      }
      if (i >= own) continue;
      float values[4] = {sum.x, sum.y, sum.z, sum.w};  // of two rows each at two channels
      CUTE_UNROLL
      for (int v = 0; v < 4; ++v) {
        int channel = tables.channels[16 * m + lane / 4 + v / 2 * 8];
        int64_t out_row = tables.out_rows[row + v % 2];
        if (v % step != summand || out_row < 0 || channel >= output_.head_dim) continue;
        store_result(output_, values[v], static_cast<Element*>(output_.out) + out_row * output_.head_dim + channel);
      }
    }
  }
};

}  // namespace cute_kernels::reduce
