// Attention by workers: S^T = K Q^T, online softmax, O^T += V^T P^T, a tile of keys and its tile of values at a time.
#pragma once

#include "cute_kernels/mma/warp/multiply_tile.hpp"
#include "cute_kernels/mma/warpgroup/multiply_tile.hpp"
#include "cute_kernels/ops/attention/load_queries.hpp"
#include "cute_kernels/ops/attention/mask.hpp"
#include "cute_kernels/ops/attention/online_softmax.hpp"
#include "cute_kernels/ops/attention/warpgroup_operands.hpp"
#include "cute_kernels/ops/attention/window.hpp"
#include "cute_kernels/ops/attention/zero_masked_values.hpp"

namespace cute_kernels::attention {

// A warp's accumulators: kBlocks blocks of 16 rows.
template <class Traits, int kBlocks>
CUTE_DEVICE auto make_accumulators() {   // ((2,2),kBlocks,N/8)
  if constexpr (Traits::kByWarpgroup) {  // in the order of WGMMA's
    return make_tensor<float>(Layout<Shape<Shape<_2, _2>, Int<kBlocks>, Int<Traits::kRowBlocks>>,
                                     Stride<Stride<_1, _2>, Int<4 * Traits::kRowBlocks>, _4>>{});
  } else {
    return partition_fragment_C(typename Traits::TiledMma{}, Shape<Int<16 * kBlocks>, Int<Traits::kN>>{});
  }
}
// The same as WGMMA takes them.
template <class Fragment>
CUTE_DEVICE auto as_warpgroup_accumulators(Fragment& tCrC /* ((2,2),MMA_M,N/8) */) {  // ((2,2,N/8),MMA_M,1)
  return make_tensor(tCrC.data(), make_layout(make_shape(make_shape(_2{}, _2{}, size<2>(tCrC)), size<1>(tCrC), _1{})));
}

template <class Traits>
CUTE_DEVICE auto make_logits() {  // (MMA,own MMA_M,MMA_N)
  return make_accumulators<Traits, Traits::kOwnTokenBlocks>();
}

template <class Traits, class Pipeline, class FragmentP, class FragmentO>
CUTE_DEVICE void attend_window_tile(Params const& params, schedule::WorkTile const& work_tile, int tile,
                                    Worker<Traits> const& worker, SharedP<Traits>& shared_p, Pipeline& pipeline,
                                    OnlineSoftmax<Traits>& softmax, FragmentP& tCrP, FragmentO& tCrO) {
  Tensor tCrS = make_logits<Traits>();
  WindowTile<Traits> window(params, work_tile, tile - work_tile.tiles.begin, worker);
  Stage keys = pipeline.next();
  window.fill(keys, params.window.keys, params.window.key_strides);
  window.multiply_keys(keys, shared_p, tCrS);
  pipeline.release();
  softmax.scale(tCrS, params.scale_log2);
  Mask::apply<Traits>(tCrS, worker.part, Mask(params, work_tile).template limits<Traits>(true),
                      [&](int position) { return window.token(position); });
  Tensor tCrWindowP = recast<typename Traits::Element>(tCrP);  // in the window's type
  softmax.step(tCrS, TokenOrders{}, tCrWindowP, tCrO, UnscaledValues{}, params.keys.dtype);
  Stage values = pipeline.next();
  window.fill(values, params.window.values, params.window.value_strides);
  window.multiply_values(values, tCrWindowP, tCrO);
  pipeline.release();
}

// A warp's part of the channels, and, in the worker's first warp, what it knows of the rows.
template <class Traits, class Fragment>
CUTE_DEVICE void store_partial(Fragment const& tCrO /* (MMA,own MMA_M,MMA_N) */, OnlineSoftmax<Traits> const& softmax,
                               int rows, int part, typename Traits::Partial* to) {
  reduce::store_vectors<typename Traits::OutputShape, Traits::kOwnChannelBlocks>(
      to->vectors, rows, part,
      [&](int m, int n) { return make_float4(tCrO(0, m, n), tCrO(1, m, n), tCrO(2, m, n), tCrO(3, m, n)); });
  int lane = threadIdx.x % 32;
  if (lane >= 4 || part > 0) return;
  CUTE_UNROLL
  for (int n = 0; n < Traits::kRowBlocks; ++n) {
    if (!reduce::has_rows(rows, lane, n)) continue;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i)
      to->rows[8 * n + 2 * lane + i] = make_float2(softmax.row_max(2 * n + i), softmax.row_sum(2 * n + i));
  }
}

// Of a worker whose split has no KV tile.
template <class Traits>
CUTE_DEVICE void store_empty_partial(int part, typename Traits::Partial* to) {
  int thread = 32 * part + ptx::lane_index();
  CUTE_UNROLL
  for (int i = 0; i < Traits::OutputShape::kVectors; i += Traits::kWorkerThreads)
    to->vectors[thread + i] = make_float4(0, 0, 0, 0);
  if (thread < Traits::kN) to->rows[thread] = make_float2(-INFINITY, 0);
}

// The scales of a tile's keys, and those of its values, at this warp's tokens.
template <class Traits>
CUTE_DEVICE auto key_scales(Stage const& keys, int part) {
  constexpr int kBefore = Traits::TileFormat::scale_row(Traits::kHeadDim) * format::kRowBytes;
  return mma::LaneScales<Traits::kOwnTokenBlocks>(keys.block + kBefore, part * Traits::kOwnTokenBlocks);
}
template <class Traits>
CUTE_DEVICE ScaledValues<Traits> value_scales(uint8_t const* row, TokenOrders const& orders, int part,
                                              SharedP<Traits>& shared_p) {
  if constexpr (Traits::kSeparateOrders) {
    if (orders.keys) return {shared_p.reorder_scales(row, orders, part)};
  }
  return {mma::LaneScales<Traits::kOwnTokenBlocks>(row, part * Traits::kOwnTokenBlocks)};
}

// sB: Q or P. used(): all loads from the stage are done.
template <class WarpgroupTraits, class Traits, class TensorB, class FragmentC, class Used>
CUTE_DEVICE void multiply_by_warpgroup(Stage const& stage, Worker<Traits> const& worker,
                                       TensorB const& sB /* (BLK_N,BLK_K) */,
                                       FragmentC& tCrC /* ((2,2),own MMA_M,N/8) */, Used&& used) {
  auto thr_mma = typename WarpgroupTraits::TiledMma{}.get_slice(threadIdx.x % mma::kWarpgroupThreads);
  Tensor tCrB = thr_mma.make_fragment_B(thr_mma.partition_B(sB));  // (MMA,MMA_N,MMA_K)
  mma::multiply_tile_by_warpgroup<WarpgroupTraits>(cast_smem_ptr_to_uint(stage.block), worker.part, tCrB,
                                                   as_warpgroup_accumulators(tCrC), used);
}

// All KV tiles of a worker's split. `pipeline` loads two stages a KV tile, keys then values. Stores the worker's
// partial of every work tile.
template <class Traits, class Pipeline>
CUTE_DEVICE void attend(Params const& params, typename Traits::Schedule const& schedule, schedule::Range split,
                        Worker<Traits> const& worker, SharedP<Traits>& shared_p, Pipeline& pipeline) {
  using TiledMma = typename Traits::TiledMma;
  using Element = typename Traits::Stored::Element;
  auto thr_mma = TiledMma{}.get_slice(threadIdx.x % 32);
  auto make_operand = [&](auto tokens_or_channels) {
    return make_tensor<Element>(
        shape(thr_mma.partition_B(make_identity_tensor(Shape<Int<Traits::kN>, decltype(tokens_or_channels)>{}))));
  };
  Tensor tCrQ = make_operand(Int<Traits::kHeadDim>{});  // (MMA,MMA_N,MMA_K); with a warpgroup not used
  [[maybe_unused]] float row_scale[OnlineSoftmax<Traits>::kRows];
  // (MMA,MMA_N,MMA_K); with a warpgroup of window tiles alone
  Tensor tCrP = make_operand(Int<Traits::kByWarpgroup ? schedule::kWindowTileTokens : Traits::kTokens>{});
  auto partial_of = [&](schedule::WorkTile const& work_tile) {
    int split = blockIdx.x * params.schedule.workers + worker.index;
    return reduce::partial<typename Traits::Partial>(params.output, split, work_tile.index);
  };
  if constexpr (Pipeline::kCombinesInCluster) {
    if (params.schedule.by_work_tile && split.begin == split.end) {
      if constexpr (!Traits::kUniform) {
        if (!params.schedule.in_cluster)
          return store_empty_partial<Traits>(worker.part, partial_of(schedule.work_tile_of_worker(worker.index, 0)));
      }
      return store_empty_partial<Traits>(worker.part, pipeline.partial());  // of uniform work tiles in a cluster only
    }
  }
  OnlineSoftmax<Traits> softmax(worker, shared_p);
  for (int tile = split.begin; tile < split.end;) {
    int warp = Traits::kWorkerWarps * worker.index + worker.part;
    auto work_tile_with = [&](uint32_t tile) {
      ptx::forget(tile);  // looked up again rather than held on to
      if constexpr (Pipeline::kCombinesInCluster) return schedule.work_tile_of_worker(worker.index, tile);
      return schedule.work_tile_with(tile);
    };
    auto same_work_tile = [&](uint32_t tile) {
      if constexpr (Pipeline::kCombinesInCluster) return schedule.kept_work_tile(worker.index, warp);
      return work_tile_with(tile);
    };
    schedule::WorkTile work_tile = work_tile_with(tile);
    if constexpr (Pipeline::kCombinesInCluster) schedule.keep_work_tile(warp, work_tile);
    int end = min(work_tile.tiles.end, split.end), tokens = work_tile.tokens;
    int window_end = tokens > 0 ? min(work_tile.window_end(), end) : end;
    softmax.reset();
    Tensor tCrO = make_accumulators<Traits, Traits::kOwnChannelBlocks>();  // (MMA,own MMA_M,MMA_N)
    clear(tCrO);

    stage_queries(params, work_tile, worker, shared_p, [&] {
      ptx::prefetch(channel_order(params.keys, work_tile));
      ptx::prefetch(channel_order(params.values, work_tile));
      if constexpr (Traits::kHasScales) {
        int line = ptx::lane_index() % (Traits::kHeadDim / 64) * 64;  // of 128 bytes
        ptx::prefetch(channel_scale(params.keys, work_tile) + line);
        ptx::prefetch(channel_scale(params.values, work_tile) + line);
      }
    });

    // With D 256 or with scales the window needs the registers: the work tile is looked up again rather than held.
    constexpr bool kHoldsWorkTile = Traits::kHeadDim < format::kMaxHeadDim && Traits::kN == 8 && !Traits::kHasScales;
    bool has_window = tile < window_end;
    CUTE_NO_UNROLL
    for (; tile < window_end; ++tile)
      attend_window_tile<Traits>(params, kHoldsWorkTile ? work_tile : same_work_tile(tile), tile, worker, shared_p,
                                 pipeline, softmax, tCrP, tCrO);
    if constexpr (!kHoldsWorkTile) work_tile = same_work_tile(end - 1);
    if (has_window) order_channels(worker, shared_p, channel_order(params.values, work_tile), tCrO);
    if constexpr (Traits::kHasScales) {
      if (has_window)
        mma::scale_channels<true>(tCrO, channel_scale(params.values, work_tile),
                                  worker.part * Traits::kOwnChannelBlocks);
      load_scaled_queries(params, worker, shared_p, channel_order(params.keys, work_tile),
                          channel_scale(params.keys, work_tile), tCrQ, row_scale);
      CUTE_UNROLL
      for (float& scale : row_scale) scale *= params.scale_log2;
    } else if constexpr (Traits::kByWarpgroup) {
      order_queries(worker, shared_p, channel_order(params.keys, work_tile), [&](int row, int column) -> uint32_t& {
        return *reinterpret_cast<uint32_t*>(&shared_p.queries()(row, column));
      });
    } else {
      load_queries(worker, shared_p, channel_order(params.keys, work_tile), tCrQ);
    }
    int first_compressed = work_tile.window_end();
    uint32_t first_masked = Mask(params, work_tile).first_masked_tile();
    // Of many rows they take too many registers: looked up where they are needed.
    constexpr bool kHoldsLimits = Traits::kN == 8;
    ptx::forget(first_masked);
    cute::array<int, kHoldsLimits ? 2 * Traits::kRowBlocks : 0> limits;
    if constexpr (kHoldsLimits) limits = Mask(params, work_tile).template limits<Traits>(false);
    CUTE_NO_UNROLL
    for (; tile < end; ++tile) {
      int first_token = (tile - first_compressed) * format::kTileTokens;
      Tensor tCrS = make_logits<Traits>();
      Stage keys = pipeline.next();
      if constexpr (Traits::kByWarpgroup) {
        multiply_by_warpgroup<typename SharedP<Traits>::Keys>(keys, worker, shared_p.queries(), tCrS, [] {});
      } else {
        clear(tCrS);
        mma::multiply_tile_part<typename Traits::Keys, Traits::kWorkerWarps>(cast_smem_ptr_to_uint(keys.block),
                                                                             worker.part, tCrQ, tCrS);
      }
      if constexpr (Traits::kHasScales)
        softmax.scale(tCrS, key_scales<Traits>(keys, worker.part), row_scale);
      else
        softmax.scale(tCrS, params.scale_log2);
      if (tile >= static_cast<int>(first_masked)) {
        ptx::keep_branch();
        auto token_at = [&](int position) { return first_token + keys.token_order[position]; };
        if constexpr (!kHoldsLimits)
          Mask::apply<Traits>(tCrS, worker.part, Mask(params, same_work_tile(tile)).template limits<Traits>(false),
                              token_at);
        else
          Mask::apply<Traits>(tCrS, worker.part, limits, token_at);
      }
      bool separate_orders = Traits::kSeparateOrders && params.separate_orders;
      [[maybe_unused]] int buffer = 0;
      TokenOrders orders = separate_orders ? TokenOrders{keys.token_order, keys.value_order} : TokenOrders{};
      if constexpr (Traits::kHasScales)
        softmax.step(tCrS, orders, tCrP, tCrO,
                     value_scales<Traits>(pipeline.value_scales(keys), orders, worker.part, shared_p));
      else if constexpr (Traits::kByWarpgroup)
        buffer = softmax.template store<Element>(tCrS, orders, tCrO);
      else
        softmax.step(tCrS, orders, tCrP, tCrO);
      pipeline.release(!separate_orders);

      Stage values = pipeline.next();
      bool zero_masked = Traits::kZeroesMasked && params.zero_masked && first_token + format::kTileTokens > tokens;
      if (zero_masked) zero_masked_values<Traits>(worker, values, tokens - first_token);
      if constexpr (Traits::kByWarpgroup) {
        multiply_by_warpgroup<typename SharedP<Traits>::Values>(values, worker, shared_p.p()(_, _, buffer), tCrO,
                                                                [&] { pipeline.release(true); });
      } else {
        mma::multiply_tile_part<typename Traits::Values, Traits::kWorkerWarps>(cast_smem_ptr_to_uint(values.block),
                                                                               worker.part, tCrP, tCrO);
        pipeline.release();
      }
    }
    softmax.finish();
    work_tile = same_work_tile(tile - 1);
    if constexpr (Traits::kHasScales)
      mma::scale_channels<false>(tCrO, channel_scale(params.values, work_tile),
                                 worker.part * Traits::kOwnChannelBlocks);
    if constexpr (Pipeline::kCombinesInCluster) {
      if (params.schedule.in_cluster)
        return store_partial<Traits>(tCrO, softmax, work_tile.rows, worker.part, pipeline.partial());
    }
    store_partial<Traits>(tCrO, softmax, work_tile.rows, worker.part, partial_of(work_tile));
  }
}

}  // namespace cute_kernels::attention
