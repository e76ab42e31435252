// P^T of a tile as WGMMA's B operand in shared memory: tokens put in the tile's order, values brought to the element
// type of V. The scale of a converted p is that of ../warp/load_probabilities.hpp.
#pragma once

#include "cute_kernels/matmul/warp/load_probabilities.hpp"
#include "cute_kernels/matmul/warpgroup/worker.hpp"

namespace cute_kernels::matmul::warpgroup {

template <class Traits, bool kConverts>
class ProbabilityLoader {
 public:
  CUTE_DEVICE ProbabilityLoader(ValueStorage<Traits>& storage, int warp) : storage_(storage) {
    int lane = threadIdx.x % 32;
    if (lane < kRowsAWarp) storage.seen[warp + lane * kWarpgroupWarps] = kLowest;  // only this warp uses those
    __syncwarp();
  }

  // Writes sB(row, column), a warp a row, two columns a lane. Rows beyond the last stay as they are: they reach
  // only accumulators that are never stored.
  template <class TensorB>
  CUTE_DEVICE void put_in_order(Params const& params, Segment const& segment, int tile, int warp, Stage stage,
                                TensorB&& sB /* (BLK_N,BLK_K) */, int turn) {
    if constexpr (!kConverts) {
      put_as<Element>(params, segment, tile, warp, stage, sB, turn);
    } else {
      visit_dtype(params.dense.dtype, [&](auto type) {
        using P = decltype(type);
        if constexpr (!std::is_same_v<P, Element>) put_as<P>(params, segment, tile, warp, stage, sB, turn);
      });
    }
    cutlass::arch::fence_view_async_shared();
  }

  // Brings accumulators to the scale of this tile's p; after the warpgroup has met.
  template <class FragmentC>
  CUTE_DEVICE void rescale(bool is_first, int turn, FragmentC& tCrC /* ((2,2,N/8),MMA_M,1) */) {
    if constexpr (!kScales) return;
    visit_columns([&](int n, int column) {
      int before = is_first ? kLowest : exponent(turn == 0 ? kTurns - 1 : turn - 1, n, column);
      int step = max(before - exponent(turn, n, column), -2 * 126);
      if (!__any_sync(~0u, step != 0)) return;
      // Two factors: a step may be larger than one power of two can hold.
      multiply_column(tCrC, n, column, power_of_two(step / 2));
      multiply_column(tCrC, n, column, power_of_two(step - step / 2));
    });
  }

  // Brings accumulators to the scale of p; `turn` of the last tile.
  template <class FragmentC>
  CUTE_DEVICE void finish(int turn, FragmentC& tCrC) {
    if constexpr (!kScales) return;
    visit_columns([&](int n, int column) {
      multiply_column(tCrC, n, column, power_of_two(exponent(turn, n, column) - kTargetExponent));
    });
  }

 private:
  using Element = typename Traits::Element;
  static constexpr bool kScales = kConverts && std::is_same_v<Element, half_t>;
  static constexpr int kRowsAWarp = Traits::kN / kWarpgroupWarps;

  ValueStorage<Traits>& storage_;

  CUTE_DEVICE int exponent(int turn, int n, int column) const {
    return storage_.exponent[turn][8 * n + 2 * (threadIdx.x % 4) + column];
  }

  template <class F>
  CUTE_DEVICE static void visit_columns(F&& f) {
    CUTE_UNROLL
    for (int n = 0; n < Traits::kN / 8; ++n) f(n, 0), f(n, 1);
  }

  template <class FragmentC>
  CUTE_DEVICE static void multiply_column(FragmentC& tCrC, int n, int column, float factor) {
    CUTE_UNROLL
    for (int m = 0; m < Traits::kBlocksM; ++m) {
      tCrC(4 * n + column, m, 0) *= factor;
      tCrC(4 * n + column + 2, m, 0) *= factor;
    }
  }

  template <class P, class TensorB>
  CUTE_DEVICE void put_as(Params const& params, Segment const& segment, int tile, int warp, Stage stage, TensorB& sB,
                          int turn) {
    int column = 2 * (threadIdx.x % 32);
    uchar2 token = {stage.token_order[format::position_of_column(column)],
                    stage.token_order[format::position_of_column(column + 1)]};
    if (params.vectorized) {  // tokens beyond the last came as zeros
      constexpr int kRowElements = dense_row_elements(std::is_same_v<P, float> ? DType::kFloat32 : DType::kFloat16);
      auto const* p = reinterpret_cast<P const*>(stage.dense_rows) + warp * kRowElements;
      CUTE_UNROLL
      for (int i = 0; i < kRowsAWarp; ++i, p += kWarpgroupWarps * kRowElements) {
        int row = warp + i * kWarpgroupWarps;
        if (row < segment.rows) put_row(row, p[token.x], p[token.y], sB, turn);
      }
    } else {
      int64_t first_token = int64_t{tile - segment.tiles.begin} * format::kTileTokens;
      int64_t tokens = params.sparse.tokens - first_token;
      auto const* p = static_cast<P const*>(params.dense.data) + first_token +
                      dense_head_offset(params.dense, params.work, segment.head);
      CUTE_NO_UNROLL
      for (int row = warp; row < segment.rows; row += kWarpgroupWarps) {
        auto const* from = p + dense_row_offset(params.dense, params.work, segment.first_row + row);
        put_row(row, token.x < tokens ? from[token.x] : P(0.f), token.y < tokens ? from[token.y] : P(0.f), sB, turn);
      }
    }
    if constexpr (kScales) {
      int row = warp + threadIdx.x % 32 * kWarpgroupWarps;
      if (row >= segment.rows && row < Traits::kN) storage_.exponent[turn][row] = kLowest;
    }
  }

  template <class P, class TensorB>
  CUTE_DEVICE void put_row(int row, P p0, P p1, TensorB& sB, int turn) {
    int lane = threadIdx.x % 32;
    float scale = 1;
    if constexpr (kScales) {  // a NaN needs no scale
      float largest = fmaxf(fmaxf(fabsf(float(p0)), fabsf(float(p1))), 0.f);
      int exponent = static_cast<int>(__reduce_max_sync(~0u, __float_as_uint(largest)) >> 23) - kExponentBias;
      exponent = max(storage_.seen[row], min(exponent, kExponentBias));
      scale = power_of_two(kTargetExponent - exponent);
      __syncwarp();
      if (lane == 0) storage_.seen[row] = storage_.exponent[turn][row] = exponent;
    }
    auto converted = [&](P p) {
      if constexpr (std::is_same_v<P, Element>)
        return p;
      else
        return Element(float(p) * scale);
    };
    alignas(4) Element values[2] = {converted(p0), converted(p1)};
    *reinterpret_cast<uint32_t*>(&sB(row, 2 * lane)) = *reinterpret_cast<uint32_t const*>(values);
  }
};

}  // namespace cute_kernels::matmul::warpgroup
