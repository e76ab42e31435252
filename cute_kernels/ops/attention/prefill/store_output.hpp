// A consumer's O, from accumulators to out and lse, or to this split's partial of them.
#pragma once

#include "cute_kernels/common/pack_halves.hpp"
#include "cute_kernels/ops/attention/prefill/channel_scales.hpp"
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
        warp_(threadIdx.x % kWarpgroupThreads / 32),
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
    auto& rows = storage_.buffer[consumer_].out[warp_];
    bool partial = params_.partial_lse != nullptr;
    // The split is needed here alone: not held on to through the loop.
    int64_t first_of_split = partial ? storage_.work_tile.split * params_.all_rows() : 0;
    QueryRows queries = work_tile_.queries(params_);
    float* lse = partial ? params_.partial_lse : params_.lse;
    CUTE_NO_UNROLL
    for (int j = 0; j < 2; ++j) {
      auto of_row = [&](auto&& number) { return j == 0 ? number(0) : number(1); };
      float sum = of_row([&](int j) { return softmax.row_sum(j); });
      float factor = sum == 0 ? 0 : ptx::reciprocal_approximate(sum);
      CUTE_UNROLL
      for (int n = 0; n < size<0, 2>(tCrO); ++n) {
        float2 pair;
        pair.x = of_row([&](int j) { return tCrO(make_coord(0, j, n), 0, 0); }) * factor;
        pair.y = of_row([&](int j) { return tCrO(make_coord(1, j, n), 0, 0); }) * factor;
        *reinterpret_cast<float2*>(&rows[lane_ / 4][8 * n + 2 * (lane_ % 4)]) = pair;
      }
      __syncwarp();
      int first = consumer_ * kConsumerRows + 16 * warp_ + 8 * j;  // in the work tile
      float log_sum_exp = of_row([&](int j) { return softmax.log_sum_exp(j); });
      // Of the 8 rows, one a lane.
      int64_t row_of_lane = first_of_split + work_tile_.output_row(params_, queries, first + lane_ % 8);
      constexpr int kRowVectors = Traits::kHeadDim / kVector;
      CUTE_NO_UNROLL
      for (int i = lane_; i < 8 * kRowVectors; i += 32) {
        int row = i / kRowVectors, channel = i % kRowVectors * kVector;
        float lse_of_row = __shfl_sync(~0u, log_sum_exp, 4 * row);
        int64_t to = __shfl_sync(~0u, row_of_lane, row);
        if (first + row >= work_tile_.rows) continue;
        if (lse && channel == 0) lse[to] = lse_of_row;
        if (channel < params_.values.head_dim) store_vector(rows[row], channel, partial, to);
      }
      __syncwarp();
    }
  }

 private:
  Params const& params_;
  WorkTile const& work_tile_;
  Storage<Traits>& storage_;
  ChannelScales<Traits> scales_;
  int consumer_, warp_, lane_;
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

  // O of a row, by column; to: of the rows of the output.
  CUTE_DEVICE void store_vector(float const* row, int channel, bool partial, int64_t to) const {
    alignas(8) uint8_t columns[kVector];
    *reinterpret_cast<uint2*>(columns) =
        *reinterpret_cast<uint2 const*>(storage_.column_of_channel[consumer_] + channel);
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
