// Consumer warpgroups: S = Q K^T, softmax, O += P V for 64 query rows each. A tile's softmax overlaps with the product
// of the tile before, as in FlashAttention-3.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "cute_kernels/mma/scales.hpp"
#include "cute_kernels/ops/attention/prefill/softmax.hpp"
#include "cute_kernels/ops/attention/prefill/storage.hpp"

namespace cute_kernels::attention::prefill {

template <class Traits>
class Consumer {
 public:
  using Element = typename Traits::Element;

  // consumer: of the CTA's.
  CUTE_DEVICE Consumer(Params const& params, WorkTile const& work_tile, Storage<Traits>& storage, int consumer)
      : params_(params),
        work_tile_(work_tile),
        storage_(storage),
        consumer_(consumer),
        thread_(threadIdx.x % kWarpgroupThreads),
        softmax_((params.scale == 0 ? 1 : fabsf(params.scale)) * kLog2E) {}

  CUTE_DEVICE void run() {
    stage_queries();
    typename Traits::TiledMmaPV mma;
    Tensor tCrO = partition_fragment_C(mma, Shape<Int<kConsumerRows>, Int<Traits::kHeadDim>>{});  // ((2,2,D/8),1,1)
    clear(tCrO);
    if (work_tile_.begin < work_tile_.end) attend(tCrO);
    ptx::launch_dependents();  // late: its CTAs find no free SM before
    softmax_.finish();
    store(tCrO);
  }

 private:
  static constexpr float kLog2E = 1.44269504088896f;
  static constexpr int kVector = 8;  // elements of q loaded at once

  Params const& params_;
  WorkTile work_tile_;  // a copy, whose numbers are in registers
  Storage<Traits>& storage_;
  int consumer_, thread_;
  Softmax<Traits::kDecodesNarrow ? 2 : 1> softmax_;

  CUTE_DEVICE int first_row() const { return consumer_ * kConsumerRows; }  // in the work tile

  // q into shared memory as WGMMA reads it. Channels in the order of the compressed keys, zeros beyond the last; rows
  // beyond the last repeat it, are computed and never stored. Times the sign of the scale, so that the largest logits have
  // the largest probabilities. Rows come as they are in vectors, and pass through registers to their places.
  CUTE_DEVICE void stage_queries() {
    constexpr int kPairs = Traits::kHeadDim / 2, kRowsAtOnce = kWarpgroupThreads / kPairs;
    constexpr int kThreadRows = kConsumerRows / kRowsAtOnce;
    static_assert(kRowsAtOnce > 0);
    Element* q = storage_.buffer[consumer_].q;
    if constexpr (Traits::kDecodesNarrow) {
      load_channel_scales([&] { copy_queries(q); });
      if (has_scales()) scale_queries(q);
    } else {
      copy_queries(q);
    }
    int column = thread_ % kPairs * 2, head_dim = params_.keys.head_dim;
    uint8_t const* channel_order = params_.keys.channel_order_of(work_tile_.sequence, work_tile_.kv_head);
    int channel0 = __ldg(channel_order + Traits::Order::position_of_column(column));
    int channel1 = __ldg(channel_order + Traits::Order::position_of_column(column + 1));
    auto sign = Element(params_.scale > 0 ? 1.f : params_.scale < 0 ? -1.f : 0.f);
    sync_warpgroup();
    uint32_t pairs[kThreadRows];
    CUTE_UNROLL
    for (int i = 0; i < kThreadRows; ++i) {
      Element const* row = q + (thread_ / kPairs + i * kRowsAtOnce) * Traits::kHeadDim;
      alignas(4) Element pair[2] = {channel0 < head_dim ? row[channel0] * sign : Element(0.f),
                                    channel1 < head_dim ? row[channel1] * sign : Element(0.f)};
      pairs[i] = *reinterpret_cast<uint32_t const*>(pair);
    }
    sync_warpgroup();
    Tensor sQ = make_tensor(make_smem_ptr(q), typename Traits::SmemLayoutQ{});  // (rows,channels)
    // The swizzle repeats after 8 rows, which keeps the addresses few.
    constexpr int kSwizzledRows = 8 / kRowsAtOnce;
    constexpr int kGroupPairs = typename Traits::template Offsets<typename Traits::SmemLayoutQ>{}(8, 0) / 2;
    CUTE_UNROLL
    for (int i = 0; i < kSwizzledRows; ++i) {
      auto* to = reinterpret_cast<uint32_t*>(&sQ(thread_ / kPairs + i * kRowsAtOnce, column));
      CUTE_UNROLL
      for (int j = 0; j < kThreadRows / kSwizzledRows; ++j) to[j * kGroupPairs] = pairs[i + j * kSwizzledRows];
    }
    ptx::compiler_fence();  // the library's fence does not say that it orders memory
    cutlass::arch::fence_view_async_shared();
    sync_warpgroup();
    if constexpr (Traits::kDecodesNarrow) {
      if (!has_scales()) return;
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) softmax_.multiply_scale(j, storage_.row_scale[consumer_][row_of_warp(j)]);
    }
  }

  // Of a narrow codec: q is multiplied by the scales of the keys' channels, O by those of the values'.
  CUTE_DEVICE bool has_scales() const {
    if constexpr (Traits::kDecodesNarrow) return params_.keys.channel_scale != nullptr;
    return false;
  }

  // Scales of channels, if there are any, in the order of memory into shared memory. meanwhile(): while they are loaded.
  template <class F>
  CUTE_DEVICE void load_channel_scales(F&& meanwhile) {
    constexpr int kThreadChannels = (Traits::kHeadDim + kWarpgroupThreads - 1) / kWarpgroupThreads;
    int channels[2][kThreadChannels];
    uint16_t scales[2][kThreadChannels];
    auto for_each = [&](auto&& f) {
      if (!has_scales()) return;
      CUTE_UNROLL
      for (int role = 0; role < 2; ++role) {
        CUTE_UNROLL
        for (int i = 0; i < kThreadChannels; ++i)
          if (int position = thread_ + i * kWarpgroupThreads; position < Traits::kHeadDim) f(role, i, position);
      }
    };
    for_each([&](int role, int i, int position) {
      format::SparseView const& view = role == 0 ? params_.keys : params_.values;
      channels[role][i] = __ldg(view.channel_order_of(work_tile_.sequence, work_tile_.kv_head) + position);
      scales[role][i] = __ldg(view.channel_scale_of(work_tile_.sequence, work_tile_.kv_head) + position);
    });
    meanwhile();
    for_each([&](int role, int i, int) {
      storage_.channel_scales[consumer_][role][channels[role][i]] = format::scale_value(scales[role][i]);
    });
    sync_warpgroup();
  }

  // Eight of them.
  CUTE_DEVICE void load_scales_of(format::Role role, int channel, float (&scales)[kVector]) const {
    if constexpr (Traits::kDecodesNarrow) {
      auto const* from =
          reinterpret_cast<float4 const*>(storage_.channel_scales[consumer_][static_cast<int>(role)] + channel);
      reinterpret_cast<float4*>(scales)[0] = from[0], reinterpret_cast<float4*>(scales)[1] = from[1];
    }
  }

  // Rows of q, in the order of memory, times scales of channels and a power of two for each row (mma/scales.hpp), in fp16.
  // A thread has the vectors that it has copied.
  CUTE_DEVICE void scale_queries(Element* q) {
    constexpr int kVectors = Traits::kHeadDim / kVector, kRowsAtOnce = kWarpgroupThreads / kVectors;
    int channel = thread_ % kVectors * kVector;
    alignas(16) float scales[kVector];
    load_scales_of(format::Role::kKey, channel, scales);
#pragma unroll 2
    for (int row = thread_ / kVectors; row < kConsumerRows; row += kRowsAtOnce) {
      auto& vector = *reinterpret_cast<uint4*>(q + row * Traits::kHeadDim + channel);
      alignas(16) uint16_t bits[kVector];
      *reinterpret_cast<uint4*>(bits) = vector;
      cutlass::Array<float, kVector> products;
      float largest = 0;
      CUTE_UNROLL
      for (int i = 0; i < kVector; ++i) {
        products[i] = channel < params_.keys.head_dim ? from_half_bits(bits[i], params_.keys.dtype) * scales[i] : 0.f;
        largest = fmaxf(largest, fabsf(products[i]));  // ignores NaN
      }
      CUTE_UNROLL
      for (int lanes = 1; lanes < kVectors; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
      int shift = mma::shift_of(largest);
      CUTE_UNROLL
      for (int i = 0; i < kVector; ++i) products[i] *= mma::power_of_two_float(shift);
      vector = convert_vector<Element>(products);
      if (thread_ % kVectors == 0) storage_.row_scale[consumer_][row] = mma::power_of_two_float(-shift);
    }
  }

  // Rows of q, channels in the order of memory.
  CUTE_DEVICE void copy_queries(Element* to) {
    if (params_.q_vectorized) {
      copy_queries(to, [](Element const* from) { return __ldg(reinterpret_cast<uint4 const*>(from)); });
    } else {
      copy_queries(to, [](Element const* from) {
        alignas(16) Element elements[kVector];
        CUTE_UNROLL
        for (int i = 0; i < kVector; ++i) elements[i] = from[i];
        return *reinterpret_cast<uint4 const*>(elements);
      });
    }
  }

  // load: kVector elements from an address. Several loads are under way before the first one is waited for. Of its 16 rows a
  // warp works out the addresses side by side, one a lane: little code, which the first CTAs have to fetch.
  template <class Load>
  CUTE_DEVICE void copy_queries(Element* to, Load&& load) {
    constexpr int kVectors = Traits::kHeadDim / kVector, kRowsAtOnce = kWarpgroupThreads / kVectors;
    constexpr int kThreadRows = kConsumerRows / kRowsAtOnce, kLoads = kThreadRows < 8 ? kThreadRows : 8;
    constexpr int kWarpRows = 32 / kVectors;  // of a warp at once
    static_assert(kWarpRows * kThreadRows == 16);
    int channel = thread_ % kVectors * kVector, first_row = thread_ / kVectors;
    auto const* q = static_cast<Element const*>(params_.q) + work_tile_.row * params_.q_strides[0] +
                    int64_t{work_tile_.kv_head} * params_.group * params_.q_strides[1] + channel;
    bool in_row = channel < params_.keys.head_dim;
    QueryRows queries = work_tile_.queries(params_);
    int of_lane = thread_ % 16, head, token;
    int row_of_lane = thread_ / 32 * kWarpRows + of_lane % kWarpRows + of_lane / kWarpRows * kRowsAtOnce;
    queries.find(params_, query_row(queries, row_of_lane), head, token);
    int64_t offset = head * params_.q_strides[1] + (queries.first_token + token) * params_.q_strides[2];
    CUTE_NO_UNROLL
    for (int i = 0; i < kThreadRows; i += kLoads) {
      uint4 vectors[kLoads];
      CUTE_UNROLL
      for (int j = 0; j < kLoads; ++j) {
        int64_t of_row = __shfl_sync(~0u, offset, (i + j) * kWarpRows + thread_ % 32 / kVectors);
        if (in_row) vectors[j] = load(q + of_row);
      }
      CUTE_UNROLL
      for (int j = 0; j < kLoads; ++j) {
        int row = first_row + (i + j) * kRowsAtOnce;
        if (in_row) *reinterpret_cast<uint4*>(to + row * Traits::kHeadDim + channel) = vectors[j];
      }
    }
  }

  // Of the KV head, for a row of this consumer's.
  CUTE_DEVICE int query_row(QueryRows const& queries, int row) const {
    return min(work_tile_.first_row + first_row() + row, queries.rows - 1);
  }

  template <class FragmentO>
  CUTE_DEVICE void attend(FragmentO& tCrO) {
    int tiles = work_tile_.end - work_tile_.begin;
    Tensor tCrQ = load_queries();
    typename Traits::TiledMmaPV mma;
    Tensor tCrP = mma.get_slice(thread_).partition_fragment_A(
        make_tensor(static_cast<Element*>(nullptr), Shape<Int<kConsumerRows>, Int<Traits::kTokens>>{}));
    if constexpr (Traits::kOverlaps) {
      multiply_keys_and_wait(0, tCrQ, tCrP);
      CUTE_NO_UNROLL
      for (int tile = 1; tile < tiles;) {
        // A loop of its own: masks would be code to jump over.
        int end = min(tiles, work_tile_.all_seen_until(work_tile_.begin + tile) - work_tile_.begin);
        CUTE_NO_UNROLL
        for (; tile < end; ++tile) step<false>(tile, tCrQ, tCrP, tCrO);
        if (tile < tiles) step<true>(tile++, tCrQ, tCrP, tCrO);
      }
      multiply_values_and_wait(Operand<Traits>::of_values(tiles - 1), tCrP, tCrO);
    } else {
      CUTE_NO_UNROLL
      for (int tile = 0; tile < tiles; ++tile) {
        if (multiply_keys_and_wait(tile, tCrQ, tCrP)) rescale(tCrO);
        multiply_values_and_wait(Operand<Traits>::of_values(tile), tCrP, tCrO);
      }
    }
  }

  // P of a tile, while O takes up the tile before.
  template <bool kMasks, class FragmentQ, class FragmentP, class FragmentO>
  CUTE_DEVICE void step(int tile, FragmentQ const& tCrQ, FragmentP& tCrP, FragmentO& tCrO) {
    unsigned keys = Operand<Traits>::of_keys(tile), values = Operand<Traits>::of_values(tile - 1);
    Tensor tCrS = make_logits();
    storage_.wait_full(keys);  // and the values, of the same step
    multiply_keys(keys, tCrQ, tCrS);
    multiply_values(values, tCrP, tCrO);
    warpgroup_wait<1>();
    bool rescales = finish_logits<kMasks>(tile, keys, tCrS);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tCrO);
    storage_.release(keys);
    if (rescales) rescale(tCrO);
    convert(tCrS, tCrP);
  }

  // P of a tile, with no product to overlap. Returns whether O is to be rescaled.
  template <class FragmentQ, class FragmentP>
  CUTE_DEVICE bool multiply_keys_and_wait(int tile, FragmentQ const& tCrQ, FragmentP& tCrP) {
    unsigned keys = Operand<Traits>::of_keys(tile);
    Tensor tCrS = make_logits();
    storage_.wait_full(keys);
    multiply_keys(keys, tCrQ, tCrS);
    warpgroup_wait<0>();
    bool rescales = finish_logits<true>(tile, keys, tCrS);
    storage_.release(keys);  // after the mask, which reads the stage's token order
    convert(tCrS, tCrP);
    return rescales;
  }

  template <bool kMasks, class FragmentS>
  CUTE_DEVICE bool finish_logits(int tile, unsigned keys, FragmentS& tCrS) {
    warpgroup_fence_operand(tCrS);
    if constexpr (kMasks) mask(tile, keys, tCrS);
    return softmax_.step(tCrS);
  }

  template <class FragmentP, class FragmentO>
  CUTE_DEVICE void multiply_values_and_wait(unsigned operand, FragmentP& tCrP, FragmentO& tCrO) {
    storage_.wait_full(operand);
    multiply_values(operand, tCrP, tCrO);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tCrO);
    storage_.release(operand);
  }

  CUTE_DEVICE static auto make_logits() {  // ((2,2,N/8),1,1)
    return partition_fragment_C(typename Traits::TiledMmaQK{}, Shape<Int<kConsumerRows>, Int<Traits::kTokens>>{});
  }

  // Q as operand A: descriptors of shared memory, or registers.
  CUTE_DEVICE auto load_queries() {  // (MMA,1,MMA_K)
    typename Traits::TiledMmaQK mma;
    Tensor sQ = make_tensor(make_smem_ptr(storage_.buffer[consumer_].q), typename Traits::SmemLayoutQ{});
    auto thr_mma = mma.get_slice(thread_);
    if constexpr (Traits::kQueriesInRegisters) {
      Tensor tCrQ = thr_mma.partition_fragment_A(sQ);
      auto tiled_copy = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
      auto thr_copy = tiled_copy.get_slice(thread_);
      cute::copy(tiled_copy, thr_copy.partition_S(as_position_independent_swizzle_tensor(sQ)), thr_copy.retile_D(tCrQ));
      return tCrQ;
    } else {
      return thr_mma.make_fragment_A(thr_mma.partition_A(sQ));
    }
  }

  // S = Q K^T. Does not wait.
  template <class FragmentQ, class FragmentS>
  CUTE_DEVICE void multiply_keys(unsigned operand, FragmentQ const& tCrQ, FragmentS& tCrS) {
    typename Traits::TiledMmaQK mma;
    auto thr_mma = mma.get_slice(thread_);
    Tensor sK = make_tensor(make_smem_ptr(storage_.stages[operand % Traits::kStages]), typename Traits::SmemLayoutK{});
    Tensor tCrK = thr_mma.make_fragment_B(thr_mma.partition_B(sK));  // (MMA,1,MMA_K)
    warpgroup_fence_operand(tCrS);
    warpgroup_arrive();
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrQ); ++k) {
      mma.accumulate_ = k == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
      cute::gemm(mma, tCrQ(_, _, k), tCrK(_, _, k), tCrS);
    }
    warpgroup_commit_batch();
  }

  // O += P V. Does not wait.
  template <class FragmentP, class FragmentO>
  CUTE_DEVICE void multiply_values(unsigned operand, FragmentP& tCrP, FragmentO& tCrO) {
    typename Traits::TiledMmaPV mma;
    auto thr_mma = mma.get_slice(thread_);
    Tensor sV = make_tensor(make_smem_ptr(storage_.stages[operand % Traits::kStages]), typename Traits::SmemLayoutV{});
    Tensor tCrV = thr_mma.make_fragment_B(thr_mma.partition_B(sV));  // (MMA,1,MMA_K)
    warpgroup_fence_operand(tCrO);
    warpgroup_fence_operand(tCrP);
    warpgroup_arrive();
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrV); ++k) cute::gemm(mma, tCrP(_, _, k), tCrV(_, _, k), tCrO);
    warpgroup_commit_batch();
  }

  // Logits of tokens that a row does not see: -infinity.
  template <class FragmentS>
  CUTE_DEVICE void mask(int tile, unsigned operand, FragmentS& tCrS) {
    int index = work_tile_.begin + tile;
    if (index < work_tile_.all_seen_until(index)) return;
    KvTile kv_tile = work_tile_.kv_tile(index);
    int pair = 2 * (thread_ % 4);  // of every 8 columns
    uint8_t const* token_order =
        storage_.token_order[operand % Traits::kStages] + Traits::Order::position_of_column(pair);
    QueryRows queries = work_tile_.queries(params_);
    int seen[2];  // of the tile's tokens
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      int head, query_token;
      queries.find(params_, query_row(queries, row_of_warp(j)), head, query_token);
      seen[j] = work_tile_.seen(params_, queries, query_token, kv_tile.in_window) - kv_tile.first_token;
    }
    CUTE_UNROLL
    for (int n = 0; n < size<0, 2>(tCrS); ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int distance = 8 * n + i;
        int token = kv_tile.in_window ? pair + distance : token_order[Traits::Order::position_of_column(distance)];
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j)
          if (token >= seen[j]) tCrS(make_coord(i, j, n), 0, 0) = -INFINITY;
      }
    }
  }

  // Of the thread's two rows, among the consumer's and in the work tile.
  CUTE_DEVICE int row_of_warp(int j) const { return thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * j; }
  CUTE_DEVICE int row_of_thread(int j) const { return first_row() + row_of_warp(j); }

  // P as A fragments: a thread has of S what it needs of P.
  template <class FragmentS, class FragmentP>
  CUTE_DEVICE static void convert(FragmentS const& tCrS /* ((2,2,N/8),1,1) */, FragmentP& tCrP /* ((2,2,2),1,N/16) */) {
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrP); ++k) {
      CUTE_UNROLL
      for (int h = 0; h < 2; ++h) {
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          cutlass::Array<float, 2> pair;
          pair[0] = tCrS(make_coord(0, j, 2 * k + h), 0, 0), pair[1] = tCrS(make_coord(1, j, 2 * k + h), 0, 0);
          cutlass::Array<Element, 2> converted = cutlass::NumericArrayConverter<Element, float, 2>{}(pair);
          tCrP(make_coord(0, j, h), 0, k) = converted[0], tCrP(make_coord(1, j, h), 0, k) = converted[1];
        }
      }
    }
  }

  template <class FragmentO>
  CUTE_DEVICE void rescale(FragmentO& tCrO /* ((2,2,D/8),1,1) */) {
    CUTE_UNROLL
    for (int n = 0; n < size<0, 2>(tCrO); ++n) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) tCrO(make_coord(i, j, n), 0, 0) *= softmax_.factor(j);
      }
    }
  }

  // Normalised, in the order of channels: out and lse, or this split's partial of them. Rows pass through shared memory
  // that q no longer needs, 8 of a warp at a time.
  template <class FragmentO>
  CUTE_DEVICE void store(FragmentO const& tCrO /* ((2,2,D/8),1,1) */) {
    sync_warpgroup();  // all have read q
    int warp = thread_ / 32, lane = thread_ % 32, head_dim = params_.values.head_dim;
    auto& rows = storage_.buffer[consumer_].out[warp];
    uint8_t const* channel_order = params_.values.channel_order_of(work_tile_.sequence, work_tile_.kv_head);
    uint8_t const* channels[2];  // of the thread's two columns of 8; loaded twice, since they would take many registers
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) channels[i] = channel_order + Traits::Order::channel_of_row(2 * (lane % 4) + i);
    bool partial = params_.partial_lse != nullptr;
    // The split is needed here alone: not held on to through the loop.
    int64_t first_of_split = partial ? storage_.work_tile.split * params_.all_rows() : 0;
    QueryRows queries = work_tile_.queries(params_);
    auto output_row = [&](int row) { return first_of_split + work_tile_.output_row(params_, queries, row); };
    float* lse = partial ? params_.partial_lse : params_.lse;
    alignas(16) float scales[kVector];
    if (has_scales()) load_scales_of(format::Role::kValue, lane * kVector % Traits::kHeadDim, scales);
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      float sum = softmax_.row_sum(j), factor = sum == 0 ? 0 : 1 / sum;
      CUTE_UNROLL
      for (int n = 0; n < size<0, 2>(tCrO); ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          rows[lane / 4][channels[i][8 * n]] = tCrO(make_coord(i, j, n), 0, 0) * factor;
        }
      }
      if (lse && lane % 4 == 0 && row_of_thread(j) < work_tile_.rows)
        lse[output_row(row_of_thread(j))] = softmax_.log_sum_exp(j);
      __syncwarp();
      int first = first_row() + 16 * warp + 8 * j;  // in the work tile
#pragma unroll 2
      for (int i = lane; i < 8 * Traits::kHeadDim / 8; i += 32) {
        int row = i / (Traits::kHeadDim / 8), channel = i % (Traits::kHeadDim / 8) * 8;
        if (first + row >= work_tile_.rows || channel >= head_dim) continue;
        int64_t to = output_row(first + row) * head_dim + channel;
        auto eight = *reinterpret_cast<cutlass::Array<float, kVector> const*>(&rows[row][channel]);
        if (has_scales()) {
          CUTE_UNROLL
          for (int k = 0; k < kVector; ++k) eight[k] *= scales[k];
        }
        if (partial) {
          auto* vectors = reinterpret_cast<float4*>(static_cast<float*>(params_.partial_out) + to);
          auto const* from = reinterpret_cast<float4 const*>(&eight);
          vectors[0] = from[0], vectors[1] = from[1];
          continue;
        }
        auto* vector = reinterpret_cast<uint4*>(static_cast<Element*>(params_.out) + to);
        if (Traits::kDecodesNarrow && params_.values.dtype == DType::kBFloat16)
          *vector = convert_vector<bfloat16_t>(eight);
        else
          *vector = convert_vector<Element>(eight);
      }
      __syncwarp();
    }
  }

  template <class To>
  CUTE_DEVICE static uint4 convert_vector(cutlass::Array<float, kVector> const& x) {
    auto converted = cutlass::NumericArrayConverter<To, float, kVector>{}(x);
    return *reinterpret_cast<uint4 const*>(&converted);
  }
};

}  // namespace cute_kernels::attention::prefill
