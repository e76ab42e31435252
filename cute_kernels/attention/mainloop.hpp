// Attention by workers: S^T = K Q^T, softmax, O^T += V^T P^T, a tile of keys and its tile of values at a time.
#pragma once

#include "cute_kernels/attention/combine.hpp"
#include "cute_kernels/attention/erase_values.hpp"
#include "cute_kernels/attention/softmax.hpp"
#include "cute_kernels/attention/stage.hpp"
#include "cute_kernels/attention/visibility.hpp"
#include "cute_kernels/attention/window.hpp"
#include "cute_kernels/matmul/warp/mainloop.hpp"

namespace cute_kernels::attention {

template <class Traits>
CUTE_DEVICE auto make_logits() {  // (MMA,own MMA_M,MMA_N)
  return partition_fragment_C(typename Traits::TiledMma{}, Shape<Int<16 * Traits::kOwnTokenBlocks>, Int<Traits::kN>>{});
}

template <class Traits, class Pipeline, class FragmentP, class FragmentO>
CUTE_DEVICE void attend_window(Params const& params, Segment const& segment, int index, int part, Pipeline& pipeline,
                               OnlineSoftmax<Traits>& softmax, FragmentP& tCrP, FragmentO& tCrO) {
  Tensor tCrS = make_logits<Traits>();
  WindowUnit<Traits> window(params, segment, index, part);
  window.multiply_keys(pipeline.next(), tCrS);
  pipeline.release();
  softmax.to_exponents(tCrS, params.scale_log2);
  Visibility::mask<Traits>(tCrS, part, Visibility(params, segment).template limits<Traits>(true),
                           [&](int position) { return window.token(position); });
  softmax.weigh(tCrS, TokenOrders{}, tCrP, tCrO);
  window.multiply_values(pipeline.next(), channel_order<Traits>(params.values, segment), tCrP, tCrO);
  pipeline.release();
}

// All units of a worker's piece. `pipeline` brings two stages a unit, keys then values. Leaves the worker's share of
// every segment, see combine.hpp.
template <class Traits, class Pipeline>
CUTE_DEVICE void attend(Params const& params, WorkLine<Traits> const& line, UnitRange piece,
                        Worker<Traits> const& worker, Exchange<Traits>& exchange, Pipeline& pipeline) {
  using TiledMma = typename Traits::TiledMma;
  using Element = typename Traits::Element;
  auto thr_mma = TiledMma{}.get_slice(threadIdx.x % 32);
  auto make_operand = [&](auto tokens_or_channels) {
    return make_tensor<Element>(
        shape(thr_mma.partition_B(make_identity_tensor(Shape<Int<Traits::kN>, decltype(tokens_or_channels)>{}))));
  };
  Tensor tCrQ = make_operand(Int<Traits::kHeadDim>{});  // (MMA,MMA_N,MMA_K)
  Tensor tCrP = make_operand(Int<Traits::kTokens>{});   // (MMA,MMA_N,MMA_K)
  OnlineSoftmax<Traits> softmax(worker, exchange);
  for (int unit = piece.begin; unit < piece.end;) {
    Segment segment = line.segment_with(unit);
    int end = min(segment.units.end, piece.end), tokens = segment.tokens;
    auto map_units = [&] {
      if constexpr (!Pipeline::kJoinsSegments) return segment.unit_map();
      uint32_t number = blockIdx.x * params.workers + worker.index;  // of the piece
      ptx::forget(number);                                           // looked up again rather than held on to
      return line.unit_map(segment, number);
    };
    UnitMap map = map_units();
    int window_end = tokens > 0 ? min(map.window_end, end) : end;
    softmax.reset();
    Tensor tCrO = partition_fragment_C(
        TiledMma{}, Shape<Int<16 * Traits::kOwnChannelBlocks>, Int<Traits::kN>>{});  // (MMA,own MMA_M,MMA_N)
    clear(tCrO);

    ptx::prefetch(channel_order<Traits>(params.keys, segment));
    ptx::prefetch(channel_order<Traits>(params.values, segment));

    // With D 256 the window needs the registers: the segment is looked up again rather than held on to.
    constexpr bool kHoldsSegment = Traits::kHeadDim < format::kMaxHeadDim;
    CUTE_NO_UNROLL
    for (; unit < window_end; ++unit)
      attend_window<Traits>(params, kHoldsSegment ? segment : line.segment_with(unit), unit - map.first_window,
                            worker.part, pipeline, softmax, tCrP, tCrO);
    if constexpr (!kHoldsSegment) segment = line.segment_with(end - 1);
    Queries<Traits>(params, segment).load(worker, exchange, channel_order<Traits>(params.keys, segment), tCrQ);
    int first_tile = map_units().first_tile;
    int seen_by_all = Visibility(params, segment).seen_by_all();
    auto limits = Visibility(params, segment).template limits<Traits>(false);
    CUTE_NO_UNROLL
    for (; unit < end; ++unit) {
      int first_token = (unit - first_tile) * kUnitTokens;
      Tensor tCrS = make_logits<Traits>();
      Stage keys = pipeline.next();
      clear(tCrS);
      matmul::multiply_tile_part<typename Traits::Keys, Traits::kWorkerWarps>(cast_smem_ptr_to_uint(keys.block),
                                                                              worker.part, tCrQ, tCrS);
      softmax.to_exponents(tCrS, params.scale_log2);
      if (first_token + kUnitTokens > seen_by_all) {
        ptx::keep_branch();
        Visibility::mask<Traits>(tCrS, worker.part, limits,
                                 [&](int position) { return first_token + keys.token_order[position]; });
      }
      bool own_orders = Traits::kOwnOrders && params.own_orders;
      softmax.weigh(tCrS, own_orders ? TokenOrders{keys.token_order, keys.value_order} : TokenOrders{}, tCrP, tCrO);
      pipeline.release(!own_orders);

      Stage values = pipeline.next();
      bool erases = !Traits::kPlain && params.erases && first_token + kUnitTokens > tokens;
      if (erases) erase_values<Traits>(worker, values, tokens - first_token);
      matmul::multiply_tile_part<typename Traits::Values, Traits::kWorkerWarps>(cast_smem_ptr_to_uint(values.block),
                                                                                worker.part, tCrP, tCrO);
      pipeline.release();
    }
    softmax.finish();
    segment = line.segment_with(unit - 1);
    if constexpr (Pipeline::kJoinsSegments) {
      if (params.by_segments)
        return leave_share<Traits>(tCrO, softmax, segment.rows, worker.part, pipeline.room_for_share());
    }
    leave_share<Traits>(tCrO, softmax, segment.rows, worker.part,
                        partial<Traits>(params, blockIdx.x * params.workers + worker.index, segment.index));
  }
}

}  // namespace cute_kernels::attention
