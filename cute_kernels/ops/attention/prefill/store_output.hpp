// A consumer's O, from accumulators to out and lse, or to this split's partial of them.
#pragma once

#include "cute_kernels/common/pack_halves.hpp"
#include "cute_kernels/ops/attention/prefill/channel_scales.hpp"
#include "cute_kernels/ops/attention/prefill/merge_splits.hpp"
#include "cute_kernels/ops/attention/prefill/softmax.hpp"

namespace cute_kernels::attention::prefill {

// Rows pass through shared memory that q no longer needs, 8 of a warp at a time, and leave it in the order of channels.
// Loops, for the same reason as in load_queries.hpp.
template <class Traits>
class OutputStore {
 public:
  CUTE_DEVICE OutputStore(Params const& params, WorkTile const& work_tile, Storage<Traits>& storage, int consumer)
      : params_(params),
        work_tile_(work_tile),
        storage_(storage),
        scales_(params, work_tile, storage, consumer),
        consumer_(consumer),
        warp_(__shfl_sync(~0u, threadIdx.x % kWarpgroupThreads / 32, 0)),
        lane_(threadIdx.x % 32) {}

  // Where channels are in O, in two halves, so that what is loaded need not be waited for at once. With all threads of the
  // consumer, and before a barrier.
  CUTE_DEVICE void load_columns() {
    uint8_t const* order = params_.values.channel_order_of(work_tile_.sequence, work_tile_.kv_head);
    for_each_column([&](int i, int column) { channels_[i] = __ldg(order + Traits::Order::channel_of_row(column)); });
  }
  CUTE_DEVICE void store_columns() const {
    for_each_column(
        [&](int i, int column) { storage_.column_of_channel[consumer_][channels_[i]] = static_cast<uint8_t>(column); });
  }

  // With all threads of the consumer, after all have read q.
  template <class FragmentO, class SoftmaxOfRows>
  CUTE_DEVICE void run(FragmentO const& tCrO /* ((2,2,D/8),1,1) */, SoftmaxOfRows const& softmax) {
    bool merges = Traits::kMayMerge && params_.merges;
    CUTE_NO_UNROLL
    for (int j = 0; j < (merges ? 3 : 2); ++j) {
      int first = 16 * warp_ + kOutRows * j, count = kOutRows;  // of the consumer's rows
      if (j < 2) normalize(tCrO, softmax, j, storage_.out_rows(consumer_, first, merges));
      if (merges) {
        if (j < 2) continue;
        sync_whole_cluster();
        SplitMerge<Traits> merge(storage_.out_rows(consumer_, 0, merges), params_.splits.divisor, warp_);
        merge.run();
        first = merge.first_row(), count = merge.count();
      }
      store_rows(storage_.out_rows(consumer_, first, merges), consumer_ * kConsumerRows + first, count);
      __syncwarp();
    }
  }

 private:
  Params const& params_;
  WorkTile const& work_tile_;
  Storage<Traits>& storage_;
  ChannelScales<Traits> scales_;
  int consumer_, warp_, lane_;
  static constexpr int kOutRows = Storage<Traits>::kOutRows, kOutStride = Storage<Traits>::kOutStride;
  static constexpr int kThreadColumns = (Traits::kHeadDim + kWarpgroupThreads - 1) / kWarpgroupThreads;
  unsigned channels_[kThreadColumns];

  template <class F>
  CUTE_DEVICE static void for_each_column(F&& f) {
    CUTE_UNROLL
    for (int i = 0; i < kThreadColumns; ++i) {
      int column = i * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads;
      if (column < Traits::kHeadDim) f(i, column);
    }
  }

  // O of the warp's first 8 rows (j: 0) or the others to shared memory, and behind each its log-sum-exp.
  template <class FragmentO, class SoftmaxOfRows>
  CUTE_DEVICE void normalize(FragmentO const& tCrO, SoftmaxOfRows const& softmax, int j, float* rows) const {
    float* row = rows + lane_ / 4 * kOutStride;
    auto of_row = [&](auto&& number) { return j == 0 ? number(0) : number(1); };
    float sum = of_row([&](int j) { return softmax.row_sum(j); });
    float factor = sum == 0 ? 0 : ptx::reciprocal_approximate(sum);
    CUTE_UNROLL
    for (int n = 0; n < size<0, 2>(tCrO); ++n) {
      float2 pair;
      pair.x = of_row([&](int j) { return tCrO(make_coord(0, j, n), 0, 0); }) * factor;
      pair.y = of_row([&](int j) { return tCrO(make_coord(1, j, n), 0, 0); }) * factor;
      *reinterpret_cast<float2*>(row + 8 * n + 2 * (lane_ % 4)) = pair;
    }
    float max = of_row([&](int j) { return softmax.row_max(j); });
    if (lane_ % 4 == 0) row[Traits::kHeadDim] = SoftmaxOfRows::log_sum_exp(max, sum);
    __syncwarp();
  }

  // The first `count` of 8 rows, from `first` of the work tile on: O by column, and behind it the log-sum-exp.
  CUTE_DEVICE void store_rows(float const* rows, int first, int count) const {
    bool partial = params_.partial_lse != nullptr;
    // The split is needed here alone: not held on to through the loop.
    int64_t first_of_split = partial ? storage_.work_tile.split * params_.all_rows() : 0;
    QueryRows queries = work_tile_.queries(params_);
    float* lse = partial ? params_.partial_lse : params_.lse;
    count = min(count, work_tile_.rows - first);
    // A lane of every quad has one of the rows.
    int64_t row_of_lane = first_of_split + work_tile_.output_row(params_, queries, first + lane_ / 4);
    if (lse && lane_ % 4 == 0 && lane_ / 4 < count) lse[row_of_lane] = rows[lane_ / 4 * kOutStride + Traits::kHeadDim];
    // A lane has the same channels of every row.
    constexpr int kRowVectors = Traits::kHeadDim / kVector, kRowsAtOnce = 32 / kRowVectors;
    int channel = lane_ % kRowVectors * kVector;
    bool in_row = channel < params_.values.head_dim;
    alignas(8) uint8_t columns[kVector];
    *reinterpret_cast<uint2*>(columns) =
        *reinterpret_cast<uint2 const*>(storage_.column_of_channel[consumer_] + channel);
    CUTE_NO_UNROLL
    for (int row = lane_ / kRowVectors; row < kOutRows; row += kRowsAtOnce) {
      int64_t to = __shfl_sync(~0u, row_of_lane, 4 * row);
      if (in_row && row < count) store_vector(rows + row * kOutStride, columns, channel, partial, to);
    }
  }

  // row: O, by column, of which the vector has `columns`; to: of the rows of the output.
  CUTE_DEVICE void store_vector(float const* row, uint8_t const (&columns)[kVector], int channel, bool partial,
                                int64_t to) const {
    cutlass::Array<float, kVector> vector;
    CUTE_UNROLL
    for (int i = 0; i < kVector; ++i) vector[i] = row[columns[i]];
    if (scales_.exist(params_)) {
      alignas(16) float scales[kVector];
      scales_.get(format::Role::kValue, channel, scales);
      CUTE_UNROLL
      for (int i = 0; i < kVector; ++i) vector[i] *= scales[i];
    }
    to = to * params_.values.head_dim + channel;
    if (partial) {
      auto* vectors = reinterpret_cast<float4*>(static_cast<float*>(params_.partial_out) + to);
      auto const* from = reinterpret_cast<float4 const*>(&vector);
      vectors[0] = from[0], vectors[1] = from[1];
      return;
    }
    auto* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(params_.out) + to);
    if (Traits::kDecodesNarrow && params_.values.dtype == DType::kBFloat16)
      *out = to_vector<bfloat16_t>(vector);
    else
      *out = to_vector<typename Traits::Element>(vector);
  }
};

}  // namespace cute_kernels::attention::prefill
