// A consumer's O, from accumulators to out and lse, or to this split's partial of them.
#pragma once

#include "cute_kernels/common/pack_halves.hpp"
#include "cute_kernels/ops/attention/prefill/channel_scales.hpp"
#include "cute_kernels/ops/attention/prefill/merge_splits.hpp"
#include "cute_kernels/ops/attention/prefill/softmax.hpp"

namespace cute_kernels::attention::prefill {

// Where channels are in O: looked up in two halves, so that what is loaded need not be waited for at once. With all threads
// of the consumer, and before a barrier.
template <class Traits>
class OutputColumns {
 public:
  CUTE_DEVICE OutputColumns(Params const& params, Storage<Traits>& storage, int consumer)
      : params_(params), storage_(storage), consumer_(consumer) {}

  CUTE_DEVICE void load() {
    WorkTile const& work_tile = storage_.work_tile;
    uint8_t const* order = params_.values.channel_order_of(work_tile.sequence, work_tile.kv_head);
    for_each([&](int i, int column) { channels_[i] = __ldg(order + Traits::Order::channel_of_row(column)); });
  }
  CUTE_DEVICE void store() const {
    for_each(
        [&](int i, int column) { storage_.column_of_channel[consumer_][channels_[i]] = static_cast<uint8_t>(column); });
  }

 private:
  Params const& params_;
  Storage<Traits>& storage_;
  int consumer_;
  static constexpr int kThreadColumns = (Traits::kHeadDim + kWarpgroupThreads - 1) / kWarpgroupThreads;
  unsigned channels_[kThreadColumns];

  template <class F>
  CUTE_DEVICE static void for_each(F&& f) {
    CUTE_UNROLL
    for (int i = 0; i < kThreadColumns; ++i) {
      int column = i * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads;
      if (column < Traits::kHeadDim) f(i, column);
    }
  }
};

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

  // With all threads of the consumer, after all have read q.
  template <class FragmentO, class SoftmaxOfRows>
  CUTE_DEVICE void run(FragmentO const& tCrO /* ((2,2,D/8),1,1) */, SoftmaxOfRows const& softmax) {
    if (Traits::kMayMerge && params_.merges) return merge_and_store(tCrO, softmax);
    CUTE_NO_UNROLL
    for (int j = 0; j < 2; ++j) {
      int first = 16 * warp_ + kOutRows * j;  // of the consumer's rows
      float* rows = storage_.out_rows(consumer_, first, false);
      normalize(tCrO, softmax, j, rows);
      store_rows(rows, output_row_of_lane(first), row_count(first, kOutRows));
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
  using Vector = cutlass::Array<float, kVector>;

  // Where the CTAs of the cluster have the splits of the work tile: each stores some of the rows. Not in run's loop, where
  // it would lie between what stores other results.
  template <class FragmentO, class SoftmaxOfRows>
  CUTE_DEVICE void merge_and_store(FragmentO const& tCrO, SoftmaxOfRows const& softmax) {
    CUTE_NO_UNROLL
    for (int j = 0; j < 2; ++j)
      normalize(tCrO, softmax, j, storage_.out_rows(consumer_, 16 * warp_ + kOutRows * j, true));
    SplitMerge<Traits> merge(storage_.out_rows(consumer_, 0, true), params_.splits, warp_);
    int first = merge.first_row(), count = row_count(first, merge.count());
    int64_t row_of_lane = output_row_of_lane(first);
    sync_whole_cluster();
    merge.run();
    cute::cluster_arrive_relaxed();  // what has been read is there
    store_rows(storage_.out_rows(consumer_, first, true), row_of_lane, count);
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

  // Of `count` rows of the consumer from `first` on, those that there are.
  CUTE_DEVICE int row_count(int first, int count) const {
    return min(count, work_tile_.rows - consumer_ * kConsumerRows - first);
  }

  // Where row lane / 4 of 8 from the consumer's row `first` on is stored.
  CUTE_DEVICE int64_t output_row_of_lane(int first) const {
    int64_t first_of_split = is_partial() ? work_tile_.split * params_.all_rows() : 0;
    int row = consumer_ * kConsumerRows + first + lane_ / 4;
    return first_of_split + work_tile_.output_row(params_, row);
  }
  CUTE_DEVICE bool is_partial() const { return params_.partial_lse != nullptr; }

  // The first `count` of 8 rows: O by column, and behind it the log-sum-exp. A lane has the same channels of every row.
  CUTE_DEVICE void store_rows(float const* rows, int64_t row_of_lane, int count) const {
    float* lse = is_partial() ? params_.partial_lse : params_.lse;
    if (lse && lane_ % 4 == 0 && lane_ / 4 < count) lse[row_of_lane] = rows[lane_ / 4 * kOutStride + Traits::kHeadDim];
    constexpr int kRowVectors = Traits::kHeadDim / kVector, kRowsAtOnce = 32 / kRowVectors;
    int channel = lane_ % kRowVectors * kVector, row = lane_ / kRowVectors;
    if (channel >= params_.values.head_dim) count = 0;
    alignas(8) uint8_t columns[kVector];
    *reinterpret_cast<uint2*>(columns) =
        *reinterpret_cast<uint2 const*>(storage_.column_of_channel[consumer_] + channel);
    uint32_t from[kVector];  // of the lane's first row
    CUTE_UNROLL
    for (int i = 0; i < kVector; ++i) from[i] = cast_smem_ptr_to_uint(rows + row * kOutStride + columns[i]);
    alignas(16) float scales[kVector];
    bool scaled = scales_.exist(params_);
    if (scaled) scales_.get(format::Role::kValue, channel, scales);
    int64_t element_of_lane = row_of_lane * params_.values.head_dim;
    CUTE_NO_UNROLL
    for (int further = 0; further < kOutRows; further += kRowsAtOnce) {
      int64_t to = __shfl_sync(~0u, element_of_lane, 4 * (further + row)) + channel;
      if (further + row >= count) continue;
      Vector vector;
      CUTE_UNROLL
      for (int i = 0; i < kVector; ++i) {
        cutlass::arch::shared_load<4>(&vector[i], from[i] + further * kOutStride * unsigned{sizeof(float)});
        if (scaled) vector[i] *= scales[i];
      }
      store_vector(vector, to);
    }
  }

  // to: of the elements of out, or of the partials.
  CUTE_DEVICE void store_vector(Vector const& vector, int64_t to) const {
    if (is_partial()) {
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
