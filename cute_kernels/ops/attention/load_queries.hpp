// Queries of a work tile, and Q^T as B fragments. Rows beyond its last repeat it, are computed and never stored.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "cute_kernels/common/pack_halves.hpp"
#include "cute_kernels/mma/scales.hpp"
#include "cute_kernels/ops/attention/params.hpp"
#include "cute_kernels/ops/attention/worker.hpp"

namespace cute_kernels::attention {

// Into the worker's shared memory, with all of its warps, channels as they lie; zeros beyond the last. What was there is
// no longer read: all warps have been through a barrier since. meanwhile(): called while vectors are under way,
// and only then.
template <class Traits, class Meanwhile>
CUTE_DEVICE void stage_queries(Params const& params, schedule::WorkTile const& work_tile, Worker<Traits> const& worker,
                               SharedP<Traits>& shared_p, Meanwhile&& meanwhile) {
  using Element = typename Traits::Element;
  constexpr int kLanes = 4 * Traits::kWorkerWarps, kRowVectors = Traits::kHeadDim / 8;  // of a row
  constexpr int kVectors = cute::max(1, kRowVectors / kLanes);                          // of a lane
  int lane = threadIdx.x % 32, first_vector = worker.part * 4 + lane % 4, head_dim = params.keys.head_dim;
  int before = 0;  // where the row's first token of those that all rows have would lie
  if constexpr (!Traits::kUniform) {
    int most = params.query_tokens.divisor;
    if (params.packed.starts) before = params.packed.position(params.packed.of_row(work_tile.row, most), 0, most);
  }
  Element const* from[Traits::kRowBlocks];
  bool in_vectors = head_dim == Traits::kHeadDim;
  CUTE_UNROLL
  for (int n = 0; n < Traits::kRowBlocks; ++n) {
    int head, token;
    params.query_tokens(head, token, work_tile.first_row + min(8 * n + lane / 4, work_tile.rows - 1));
    from[n] = static_cast<Element const*>(params.q) + work_tile.row * params.q_strides[0] +
              (int64_t{work_tile.kv_head} * params.group + head) * params.q_strides[1] +
              max(0, before + token) * params.q_strides[2];
    in_vectors &= reinterpret_cast<uintptr_t>(from[n]) % 16 == 0;
  }
  auto for_rows = [&](auto&& f) {
    CUTE_UNROLL
    for (int n = 0; n < Traits::kRowBlocks; ++n) f(n, shared_p.query(8 * n + lane / 4));
  };
  if (!in_vectors) {
    for_rows([&](int n, Element* to) {
      CUTE_NO_UNROLL
      for (int channel = first_vector; channel < Traits::kHeadDim; channel += kLanes)
        to[channel] = channel < head_dim ? from[n][channel] : Element(0.f);
    });
  } else if (kRowVectors >= kLanes || first_vector < kRowVectors) {
    uint4 vectors[Traits::kRowBlocks][kVectors];  // all are under way before the first is stored
    for_rows([&](int n, Element*) {
      CUTE_UNROLL
      for (int i = 0; i < kVectors; ++i)
        vectors[n][i] = reinterpret_cast<uint4 const*>(from[n])[first_vector + i * kLanes];
    });
    meanwhile();
    for_rows([&](int n, Element* to) {
      CUTE_UNROLL
      for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(to)[first_vector + i * kLanes] = vectors[n][i];
    });
  }
  worker.sync();
}

// Pairs of neighbouring columns that a thread has when queries are put into the order of the compressed keys: in rows
// kRowStep apart, of columns 2 kWorkerThreads apart.
template <class Traits>
struct QueryPairs {
  static constexpr int kPairs = Traits::kHeadDim / 2;  // of a row
  static constexpr int kThreads = Traits::kWorkerThreads, kOwnPairs = cute::max(1, kPairs / kThreads);
  static constexpr int kRowStep = cute::max(1, kThreads / kPairs), kOwnRows = Traits::kN / kRowStep;
  int thread = threadIdx.x % kThreads;

  CUTE_DEVICE int row(int n) const { return thread / kPairs + n * kRowStep; }
  CUTE_DEVICE int column(int i) const { return 2 * (thread % kPairs + i * kThreads); }
  CUTE_DEVICE static int channel(uint8_t const* channel_order, int column) {
    return __ldg(channel_order + Traits::TileFormat::position_of_column(column));
  }

  // f(i, n) for each: i of the columns, n of the rows.
  template <class F>
  CUTE_DEVICE static void for_each(F&& f) {
    CUTE_UNROLL
    for (int i = 0; i < kOwnPairs; ++i) {
      CUTE_UNROLL
      for (int n = 0; n < kOwnRows; ++n) f(i, n);
    }
  }
};

// Puts the staged queries into the order of the compressed keys' columns, where they are. With all of the worker's
// warps, when none reads them as they were any longer. pair_at(row, column): where two neighbouring columns go.
template <class Traits, class PairAt>
CUTE_DEVICE void order_queries(Worker<Traits> const& worker, SharedP<Traits>& shared_p, uint8_t const* channel_order,
                               PairAt&& pair_at) {
  QueryPairs<Traits> own;
  uint32_t pairs[own.kOwnPairs][own.kOwnRows];
  CUTE_UNROLL
  for (int i = 0; i < own.kOwnPairs; ++i) {
    int channels[2];
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) channels[j] = own.channel(channel_order, own.column(i) + j);
    CUTE_UNROLL
    for (int n = 0; n < own.kOwnRows; ++n) {
      auto const* query = reinterpret_cast<uint16_t const*>(shared_p.query(own.row(n)));
      pairs[i][n] = query[channels[0]] | uint32_t{query[channels[1]]} << 16;
    }
  }
  worker.sync();  // all have been read
  own.for_each([&](int i, int n) { pair_at(own.row(n), own.column(i)) = pairs[i][n]; });
  if constexpr (Traits::kByWarpgroup) shared_p.publish();
  worker.sync();
}

// Queries that are in order as B fragments: matrices of 8 rows and 8 columns, four at a time.
template <class Traits, class Fragment>
CUTE_DEVICE void load_ordered_queries(SharedP<Traits>& shared_p, Fragment& tCrB /* ((2,2),MMA_N,MMA_K) */) {
  CUTE_STATIC_ASSERT_V((shape<0>(tCrB) == Shape<_2, _2>{}));  // two neighbouring columns, then 8 further on
  int lane = threadIdx.x % 32;
  Tensor words = recast<uint32_t>(tCrB);  // ((1,2),MMA_N,MMA_K)
  CUTE_UNROLL
  for (int n = 0; n < Traits::kRowBlocks; ++n) {
    auto const* from = shared_p.query(8 * n + lane % 8) + 8 * (lane / 8);
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrB); k += 2)
      SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const*>(from + 16 * k), words(0, n, k), words(1, n, k),
                              words(0, n, k + 1), words(1, n, k + 1));
  }
}

// As B fragments.
template <class Traits, class Fragment>
CUTE_DEVICE void load_queries(Worker<Traits> const& worker, SharedP<Traits>& shared_p, uint8_t const* channel_order,
                              Fragment& tCrB /* ((2,2),MMA_N,MMA_K) */) {
  order_queries(worker, shared_p, channel_order, [&](int row, int column) -> uint32_t& {
    return reinterpret_cast<uint32_t*>(shared_p.query(row))[column / 2];
  });
  load_ordered_queries(shared_p, tCrB);
}

// The same times the scales of the channels and a power of two for each row, see mma/scales.hpp. undo[2 n + i]: what the
// accumulators of rows 8 n + 2 (lane % 4) + i must be multiplied by.
template <class Traits, class Fragment, int kRows>
CUTE_DEVICE void load_scaled_queries(Params const& params, Worker<Traits> const& worker, SharedP<Traits>& shared_p,
                                     uint8_t const* channel_order, uint16_t const* channel_scale,
                                     Fragment& tCrB /* ((2,2),MMA_N,MMA_K) */, float (&undo)[kRows]) {
  using Element = typename Fragment::value_type;
  QueryPairs<Traits> own;
  float2 products[own.kOwnPairs][own.kOwnRows];
  float largest[own.kOwnRows] = {};
  CUTE_UNROLL
  for (int i = 0; i < own.kOwnPairs; ++i) {
    int channels[2];
    float scales[2];
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      channels[j] = own.channel(channel_order, own.column(i) + j);
      scales[j] = format::scale_value(__ldg(channel_scale + Traits::TileFormat::position_of_column(own.column(i) + j)));
    }
    CUTE_UNROLL
    for (int n = 0; n < own.kOwnRows; ++n) {
      auto const* query = shared_p.query(own.row(n));
      float2& product = products[i][n];
      product.x = from_half_bits(query[channels[0]], params.keys.dtype) * scales[0];
      product.y = from_half_bits(query[channels[1]], params.keys.dtype) * scales[1];
      largest[n] = fmaxf(largest[n], fmaxf(fabsf(product.x), fabsf(product.y)));  // ignores NaN
    }
  }
  // Of rows that other warps have, 0.
  static_assert(own.kPairs >= 32, "a warp's pairs are of the same rows");
  int lane = threadIdx.x % 32;
  float of_lane = 0;
  CUTE_UNROLL
  for (int n = 0; n < own.kOwnRows; ++n) {
    uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(largest[n]));  // floats from 0 on are ordered as integers
    if (lane == own.row(n)) of_lane = __uint_as_float(of_warp);
  }
  if (lane < Traits::kN) shared_p.number_of_row(worker.part, lane) = of_lane;
  worker.sync();     // all queries have been read
  float of_row = 0;  // of row lane % kN
  CUTE_UNROLL
  for (int warp = 0; warp < Traits::kWorkerWarps; ++warp)
    of_row = fmaxf(of_row, shared_p.number_of_row(warp, lane % Traits::kN));
  int shift = mma::shift_of(of_row);
  float factor[own.kOwnRows];
  CUTE_UNROLL
  for (int n = 0; n < own.kOwnRows; ++n) factor[n] = mma::power_of_two_float(__shfl_sync(~0u, shift, own.row(n)));
  own.for_each([&](int i, int n) {
    float2 product = products[i][n];
    reinterpret_cast<uint32_t*>(shared_p.query(own.row(n)))[own.column(i) / 2] =
        to_pair<Element>(product.x * factor[n], product.y * factor[n]);
  });
  CUTE_UNROLL
  for (int i = 0; i < kRows; ++i)
    undo[i] = mma::power_of_two_float(-__shfl_sync(~0u, shift, i / 2 * 8 + 2 * (lane % 4) + i % 2));
  worker.sync();
  load_ordered_queries(shared_p, tCrB);
}

}  // namespace cute_kernels::attention
