// Consumer warpgroups: S = Q K^T, softmax, O += P V for 64 query rows each. A tile's softmax overlaps with the product
// of the tile before, as in FlashAttention-3.
#pragma once

#include "cute_kernels/ops/attention/prefill/load_queries.hpp"
#include "cute_kernels/ops/attention/prefill/store_output.hpp"

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
    OutputColumns<Traits> columns(params_, storage_, consumer_);
    columns.load();
    QueryLoader<Traits>(params_, work_tile_, storage_, consumer_).run();
    columns.store();
    if constexpr (Traits::kDecodesNarrow) {
      if (ChannelScales<Traits>::exist(params_)) {
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) softmax_.multiply_scale(j, storage_.row_scale[consumer_][row_of_warp(j)]);
      }
    }
    typename Traits::TiledMmaPV mma;
    Tensor tCrO = partition_fragment_C(mma, Shape<Int<kConsumerRows>, Int<Traits::kHeadDim>>{});  // ((2,2,D/8),1,1)
    clear(tCrO);
    if (work_tile_.begin < work_tile_.end) attend(tCrO);
    ptx::launch_dependents();  // late: its CTAs find no free SM before
    softmax_.finish();
    // All have read q, and stored columns.
    if (Traits::kMayMerge && params_.merges)
      pipeline::sync(pipeline::NamedBarrier::kAllWorkers, Traits::kConsumers * kWarpgroupThreads);
    else
      sync_warpgroup();
    OutputStore<Traits>(params_, work_tile_, storage_, consumer_).run(tCrO, softmax_);
  }

 private:
  static constexpr float kLog2E = 1.44269504088896f;

  Params const& params_;
  WorkTile work_tile_;  // a copy, whose numbers are in registers
  Storage<Traits>& storage_;
  int consumer_, thread_;
  Softmax<Traits::kDecodesNarrow ? 2 : 1> softmax_;

  template <class FragmentO>
  CUTE_DEVICE void attend(FragmentO& tCrO) {
    int tiles = work_tile_.end - work_tile_.begin;
    Tensor tCrQ = load_queries();
    typename Traits::TiledMmaPV mma;
    Tensor tCrP = mma.get_slice(thread_).partition_fragment_A(
        make_tensor(static_cast<Element*>(nullptr), Shape<Int<kConsumerRows>, Int<Traits::kTokens>>{}));
    Stage<Traits> stage{0};
    if constexpr (Traits::kOverlaps) {
      CUTE_NO_UNROLL
      for (int tile = 0; tile < tiles;) {
        step<true>(tile++, stage, tCrQ, tCrP, tCrO);
        // A loop of its own: masks would be code to jump over.
        int end = min(tiles, work_tile_.all_seen_until(work_tile_.begin + tile) - work_tile_.begin);
        CUTE_NO_UNROLL
        for (; tile < end; ++tile) step<false>(tile, stage, tCrQ, tCrP, tCrO);
      }
      unsigned no_keys = stage.index;
      stage.advance(1);
      multiply_values_and_wait(stage, tCrP, tCrO);
      if constexpr (Traits::kReleasesKeysFirst) storage_.release(no_keys);
    } else {
      CUTE_NO_UNROLL
      for (int tile = 0; tile < tiles; ++tile) {
        if (multiply_keys_and_wait(tile, stage, tCrQ, tCrP)) rescale(tCrO);
        stage.advance(1);
        multiply_values_and_wait(stage, tCrP, tCrO);
        stage.advance(1);
      }
    }
  }

  // P of a tile, while O takes up the tile before. stage: of the keys; the values are in the next one. kMasks: the tile may
  // be the first, and there may be tokens that a row does not see.
  template <bool kMasks, class FragmentQ, class FragmentP, class FragmentO>
  CUTE_DEVICE void step(int tile, Stage<Traits>& stage, FragmentQ const& tCrQ, FragmentP& tCrP, FragmentO& tCrO) {
    unsigned keys = stage.index;
    Tensor tCrS = make_logits();
    storage_.wait_full(stage);  // and the values, of the same step
    multiply_keys(keys, tCrQ, tCrS);
    if (kMasks && tile == 0) {
      warpgroup_wait<0>();
    } else {
      multiply_values(keys + 1, tCrP, tCrO);
      warpgroup_wait<1>();
    }
    stage.advance(2);
    if constexpr (Traits::kReleasesKeysFirst && !kMasks) storage_.release(keys);
    bool rescales = finish_logits<kMasks>(tile, keys, tCrS, [&] {
      warpgroup_wait<0>();
      warpgroup_fence_operand(tCrO);
      if constexpr (!Traits::kReleasesKeysFirst || kMasks) storage_.release(keys);  // masks read their token order
      if constexpr (Traits::kReleasesKeysFirst) storage_.release(keys + 1);
    });
    if (rescales) rescale(tCrO);
    convert(tCrS, tCrP);
  }

  // P of a tile, with no product to overlap. Returns whether O is to be rescaled.
  template <class FragmentQ, class FragmentP>
  CUTE_DEVICE bool multiply_keys_and_wait(int tile, Stage<Traits> stage, FragmentQ const& tCrQ, FragmentP& tCrP) {
    unsigned keys = stage.index;
    Tensor tCrS = make_logits();
    storage_.wait_full(stage);
    multiply_keys(keys, tCrQ, tCrS);
    warpgroup_wait<0>();
    // After the mask, which reads the stage's token order.
    bool rescales = finish_logits<true>(tile, keys, tCrS, [&] { storage_.release(keys); });
    convert(tCrS, tCrP);
    return rescales;
  }

  template <bool kMasks, class FragmentS, class F>
  CUTE_DEVICE bool finish_logits(int tile, unsigned keys, FragmentS& tCrS, F&& meanwhile) {
    warpgroup_fence_operand(tCrS);
    if constexpr (kMasks) mask(tile, keys, tCrS);
    return softmax_.step(tCrS, meanwhile);
  }

  template <class FragmentP, class FragmentO>
  CUTE_DEVICE void multiply_values_and_wait(Stage<Traits> stage, FragmentP& tCrP, FragmentO& tCrO) {
    storage_.wait_full(stage);
    multiply_values(stage.index, tCrP, tCrO);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tCrO);
    storage_.release(stage.index);
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
  CUTE_DEVICE void multiply_keys(unsigned stage, FragmentQ const& tCrQ, FragmentS& tCrS) {
    typename Traits::TiledMmaQK mma;
    auto thr_mma = mma.get_slice(thread_);
    Tensor sK = make_tensor(make_smem_ptr(storage_.stages[0]), typename Traits::SmemLayoutStagesK{});
    Tensor tCrK = thr_mma.make_fragment_B(thr_mma.partition_B(sK))(_, _, _, stage);  // (MMA,1,MMA_K)
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
  CUTE_DEVICE void multiply_values(unsigned stage, FragmentP& tCrP, FragmentO& tCrO) {
    typename Traits::TiledMmaPV mma;
    auto thr_mma = mma.get_slice(thread_);
    Tensor sV = make_tensor(make_smem_ptr(storage_.stages[0]), typename Traits::SmemLayoutStagesV{});
    Tensor tCrV = thr_mma.make_fragment_B(thr_mma.partition_B(sV))(_, _, _, stage);  // (MMA,1,MMA_K)
    warpgroup_fence_operand(tCrO);
    warpgroup_fence_operand(tCrP);
    warpgroup_arrive();
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrV); ++k) cute::gemm(mma, tCrP(_, _, k), tCrV(_, _, k), tCrO);
    warpgroup_commit_batch();
  }

  // Logits of tokens that a row does not see: -infinity.
  template <class FragmentS>
  CUTE_DEVICE void mask(int tile, unsigned stage, FragmentS& tCrS) {
    int index = work_tile_.begin + tile;
    if (index < work_tile_.all_seen_until(index)) return;
    KvTile kv_tile = work_tile_.kv_tile(index);
    int pair = 2 * (thread_ % 4);  // of every 8 columns
    uint8_t const* token_order = storage_.token_order[stage] + Traits::Order::position_of_column(pair);
    QueryRows queries = work_tile_.queries(params_);
    int seen[2];  // of the tile's tokens
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      int head, query_token;
      queries.find(params_, work_tile_.query_row(queries, consumer_ * kConsumerRows + row_of_warp(j)), head,
                   query_token);
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

  // Of the thread's two rows, among the consumer's.
  CUTE_DEVICE int row_of_warp(int j) const { return thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * j; }

  // P as A fragments: a thread has of S what it needs of P.
  template <class FragmentS, class FragmentP>
  CUTE_DEVICE static void convert(FragmentS const& tCrS /* ((2,2,N/8),1,1) */, FragmentP& tCrP /* ((2,2,2),1,N/16) */) {
    Tensor pairs = recast<uint32_t>(tCrP);  // ((1,2,2),1,N/16)
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrP); ++k) {
      CUTE_UNROLL
      for (int h = 0; h < 2; ++h) {
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          pairs(make_coord(0, j, h), 0, k) =
              to_pair<Element>(tCrS(make_coord(0, j, 2 * k + h), 0, 0), tCrS(make_coord(1, j, 2 * k + h), 0, 0));
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
};

}  // namespace cute_kernels::attention::prefill
