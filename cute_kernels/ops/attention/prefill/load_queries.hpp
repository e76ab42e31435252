// A consumer's queries, from global memory to where operand A is read.
//
// A warp has the 16 rows that it multiplies: q comes in vectors, channels in the order of memory, into the rows of
// SmemLayoutQ; then every row is put into the order of the compressed keys' columns, where it is. Loops, and not code for
// every row: it runs once, and code that is not there yet takes longer to arrive than to run.
#pragma once

#include <cutlass/arch/memory.h>

#include "cute_kernels/common/pack_halves.hpp"
#include "cute_kernels/ops/attention/prefill/channel_scales.hpp"

namespace cute_kernels::attention::prefill {

template <class Traits>
class QueryLoader {
 public:
  using Element = typename Traits::Element;

  CUTE_DEVICE QueryLoader(Params const& params, WorkTile const& work_tile, Storage<Traits>& storage, int consumer)
      : params_(params),
        work_tile_(work_tile),
        storage_(storage),
        consumer_(consumer),
        first_row_(threadIdx.x % kWarpgroupThreads / 32 * kWarpRows),
        lane_(threadIdx.x % 32) {
    uint8_t const* order = params.keys.channel_order_of(work_tile.sequence, work_tile.kv_head);
    CUTE_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i)
        channels_[p][i] = __ldg(order + Traits::Order::position_of_column(64 * p + 2 * lane_ + i));
    }
  }

  // With all threads of the consumer. Rows beyond the last repeat it, are computed and never stored. Times the sign of
  // the scale, so that the largest logits have the largest probabilities.
  CUTE_DEVICE void run() {
    ChannelScales<Traits> scales(params_, work_tile_, storage_, consumer_);
    scales.load([&] { copy(); });
    __syncwarp();
    if constexpr (Traits::kDecodesNarrow) {
      if (scales.exist(params_)) scale_rows(scales);
    }
    order_channels();
    ptx::compiler_fence();  // the library's fence does not say that it orders memory
    cutlass::arch::fence_view_async_shared();
    sync_warpgroup();
  }

 private:
  Params const& params_;
  WorkTile const& work_tile_;
  Storage<Traits>& storage_;
  int consumer_;
  unsigned first_row_, lane_;                           // of the warp, among the consumer's
  static constexpr int kPairs = Traits::kHeadDim / 64;  // of neighbouring columns, that a lane puts in order
  unsigned channels_[kPairs][2];                        // of their columns

  static constexpr int kWarpRows = kConsumerRows / kWarpgroupWarps;
  static constexpr int kRowVectors = Traits::kHeadDim / kVector;
  static constexpr int kRowsAtOnce = 32 / kRowVectors, kLoads = kWarpRows / kRowsAtOnce;  // of a lane
  static_assert(kRowsAtOnce > 0 && kWarpRows == 16);

  CUTE_DEVICE unsigned channel() const { return lane_ % kRowVectors * kVector; }  // the first of the lane's vectors
  CUTE_DEVICE unsigned row(int load) const { return first_row_ + load * kRowsAtOnce + lane_ / kRowVectors; }

  // Shared-memory address of an element.
  CUTE_DEVICE uint32_t address(unsigned row, unsigned column) const {
    typename Traits::template Offsets<typename Traits::SmemLayoutQ> layout;  // (rows,channels)
    return cast_smem_ptr_to_uint(storage_.buffer[consumer_].q) + layout(row, column) * unsigned{sizeof(Element)};
  }

  // Several loads are under way before the first one is waited for. Where its 16 rows begin a warp works out side by
  // side, one a lane.
  CUTE_DEVICE void copy() {
    bool in_row = channel() < params_.keys.head_dim;
    auto const* q = static_cast<Element const*>(params_.q) + work_tile_.row * params_.q_strides[0] +
                    int64_t{work_tile_.kv_head} * params_.group * params_.q_strides[1] + channel();
    QueryRows queries = work_tile_.queries(params_);
    int head, token, row_of_work_tile = consumer_ * kConsumerRows + first_row_ + lane_ % kWarpRows;
    queries.find(params_, work_tile_.query_row(queries, row_of_work_tile), head, token);
    int64_t offset = head * params_.q_strides[1] + (queries.first_token + token) * params_.q_strides[2];
    auto from = [&](int load) { return q + __shfl_sync(~0u, offset, load * kRowsAtOnce + lane_ / kRowVectors); };
    if (params_.q_vectorized) {
      constexpr int kAtOnce = kLoads < 8 ? kLoads : 8;
      CUTE_NO_UNROLL
      for (int load = 0; load < kLoads; load += kAtOnce) {
        uint4 vectors[kAtOnce];
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          auto const* of_row = reinterpret_cast<uint4 const*>(from(load + i));
          vectors[i] = in_row ? __ldg(of_row) : make_uint4(0, 0, 0, 0);
        }
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce; ++i)
          cutlass::arch::shared_store<16>(address(row(load + i), channel()), &vectors[i]);
      }
    } else {
      CUTE_NO_UNROLL
      for (int load = 0; load < kLoads; ++load) {
        auto const* of_row = reinterpret_cast<uint16_t const*>(from(load));
        CUTE_NO_UNROLL
        for (int i = 0; i < kVector; ++i) {
          uint16_t element = in_row ? of_row[i] : uint16_t{0};
          cutlass::arch::shared_store<2>(address(row(load), channel() + i), &element);
        }
      }
    }
  }

  // Rows in the order of memory, times scales of channels and a power of two for each row (mma/scales.hpp), in fp16. A
  // lane has the vectors that it has copied.
  CUTE_DEVICE void scale_rows(ChannelScales<Traits> const& channel_scales) {
    alignas(16) float scales[kVector];
    channel_scales.get(format::Role::kKey, channel(), scales);
    bool in_row = channel() < params_.keys.head_dim;
#pragma unroll 2
    for (int load = 0; load < kLoads; ++load) {
      alignas(16) uint16_t bits[kVector];
      cutlass::arch::shared_load<16>(bits, address(row(load), channel()));
      cutlass::Array<float, kVector> products;
      float largest = 0;
      CUTE_UNROLL
      for (int i = 0; i < kVector; ++i) {
        products[i] = in_row ? from_half_bits(bits[i], params_.keys.dtype) * scales[i] : 0.f;
        largest = fmaxf(largest, fabsf(products[i]));  // ignores NaN
      }
      CUTE_UNROLL
      for (int lanes = 1; lanes < kRowVectors; lanes *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
      int shift = mma::shift_of(largest);
      CUTE_UNROLL
      for (int i = 0; i < kVector; ++i) products[i] *= mma::power_of_two_float(shift);
      uint4 vector = to_vector<Element>(products);
      cutlass::arch::shared_store<16>(address(row(load), channel()), &vector);
      if (lane_ % kRowVectors == 0) storage_.row_scale[consumer_][row(load)] = mma::power_of_two_float(-shift);
    }
    __syncwarp();
  }

  // Two rows at a time, 8 apart.
  CUTE_DEVICE void order_channels() {
    float sign = params_.scale > 0 ? 1.f : params_.scale < 0 ? -1.f : 0.f;
    uint32_t signs = to_pair<Element>(sign, sign);
    uint32_t from[kPairs][2], to[kPairs];  // in the warp's first row
    CUTE_UNROLL
    for (int p = 0; p < kPairs; ++p) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) from[p][i] = address(first_row_, channels_[p][i]);
      to[p] = address(first_row_, 64 * p + 2 * lane_);
    }
    CUTE_NO_UNROLL
    for (unsigned row = 0; row < 8; ++row) {
      uint32_t pairs[2][kPairs];
      auto for_each = [&](auto&& f) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          CUTE_UNROLL
          for (int p = 0; p < kPairs; ++p) f(r * kEightRowsBytes, p, pairs[r][p]);
        }
      };
      for_each([&](uint32_t further, int p, uint32_t& pair) {
        pair = ptx::load_shared_u16((from[p][0] ^ row_bits(row)) + further) |
               ptx::load_shared_u16((from[p][1] ^ row_bits(row)) + further) << 16;
        pair = Traits::kIsHalf ? ptx::multiply_halves(pair, signs) : ptx::multiply_bfloats(pair, signs);
      });
      __syncwarp();
      for_each([&](uint32_t further, int p, uint32_t& pair) {
        cutlass::arch::shared_store<4>((to[p] ^ row_bits(row)) + further, &pair);
      });
    }
  }
};

}  // namespace cute_kernels::attention::prefill
