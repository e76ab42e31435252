// Queries of a work tile, and Q^T as B fragments. Rows beyond its last repeat it, are computed and never stored.
#pragma once

#include "cute_kernels/mma/scales.hpp"
#include "cute_kernels/ops/attention/params.hpp"
#include "cute_kernels/ops/attention/worker.hpp"

namespace cute_kernels::attention {

// Into the worker's shared memory, with all of its warps, channels as they lie; zeros beyond the last. What was there is
// no longer read: all warps have been through a barrier since.
template <class Traits>
CUTE_DEVICE void stage_queries(Params const& params, schedule::WorkTile const& work_tile, Worker<Traits> const& worker,
                               SharedP<Traits>& shared_p) {
  using Element = typename Traits::Element;
  constexpr int kSteps = Traits::kHeadDim / (4 * Traits::kWorkerWarps);  // of a quad, which has a row of each block
  int lane = threadIdx.x % 32, first_channel = 4 * kSteps * worker.part + lane % 4;  // then every fourth
  int before = 0;  // where the row's first token of those that all rows have would lie
  if constexpr (!Traits::kUniform) {
    int most = params.query_tokens.divisor;
    if (params.packed.starts) before = params.packed.position(params.packed.of_row(work_tile.row, most), 0, most);
  }
  CUTE_UNROLL
  for (int n = 0; n < Traits::kRowBlocks; ++n) {
    int row = 8 * n + lane / 4, head, token;
    params.query_tokens(head, token, work_tile.first_row + min(row, work_tile.rows - 1));
    auto const* from = static_cast<Element const*>(params.q) + work_tile.row * params.q_strides[0] +
                       (int64_t{work_tile.kv_head} * params.group + head) * params.q_strides[1] +
                       max(0, before + token) * params.q_strides[2];
    Element values[kSteps];
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      int channel = first_channel + 4 * i;
      values[i] = channel < params.keys.head_dim ? from[channel] : Element(0.f);
    }
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) shared_p.query(row)[first_channel + 4 * i] = values[i];
  }
  worker.sync();
}

// Channels in the order of the compressed keys.
template <class Traits, class Fragment>
CUTE_DEVICE void load_queries(SharedP<Traits>& shared_p, uint8_t const* channel_order,
                              Fragment& tCrB /* ((2,2),MMA_N,MMA_K) */) {
  CUTE_STATIC_ASSERT_V((shape<0>(tCrB) == Shape<_2, _2>{}));  // two neighbouring columns, then 8 further on
  int lane = threadIdx.x % 32;
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrB); ++k) {
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      // The position of column + 8 is next.
      int position = Traits::TileFormat::position_of_column(16 * k + j) + 2 * (lane % 4);
      uint32_t channels = __ldg(reinterpret_cast<uint16_t const*>(channel_order + position));
      CUTE_UNROLL
      for (int n = 0; n < Traits::kRowBlocks; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i)
          tCrB(make_coord(j, i), n, k) = shared_p.query(8 * n + lane / 4)[channels >> (8 * i) & 0xff];
      }
    }
  }
}

// The same times the scales of the channels, see mma/scales.hpp.
template <class Traits, class Fragment, int kRows>
CUTE_DEVICE void load_scaled_queries(Params const& params, SharedP<Traits>& shared_p, uint8_t const* channel_order,
                                     uint16_t const* channel_scale, Fragment& tCrB /* ((2,2),MMA_N,MMA_K) */,
                                     float (&undo)[kRows]) {
  auto product = [&](int lane, int n, int v, int k) {
    int position = Traits::TileFormat::position_of_column(16 * k + v % 2) + 2 * (lane % 4) + v / 2;
    int channel = __ldg(channel_order + position);
    float q = from_half_bits(shared_p.query(8 * n + lane / 4)[channel], params.keys.dtype);
    return q * format::scale_value(__ldg(channel_scale + position));
  };
  mma::load_scaled_rows(tCrB, product, undo);
}

}  // namespace cute_kernels::attention
