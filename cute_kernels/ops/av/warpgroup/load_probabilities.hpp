// P^T of a tile as WGMMA's B operand in shared memory: tokens put in the tile's order, values brought to the element
// type of V. The scale of a converted p is that of ../load_probabilities.hpp.
#pragma once

#include "cute_kernels/mma/warpgroup/traits.hpp"
#include "cute_kernels/ops/av/load_probabilities.hpp"
#include "cute_kernels/ops/av/sm90_params.hpp"

namespace cute_kernels::av::sm90 {

using mma::kWarpgroupWarps;

// Tiles alternate between places for their exponents: while some warps still read those of a tile and the tile before,
// others write those of the next.
inline constexpr int kExponentBuffers = 3;

// A warpgroup's shared memory: p as WGMMA's B operand, one buffer for the tile that is multiplied and one for the tile
// whose p is being put in order, and the scales of its rows.
template <class Traits>
struct WarpgroupStorage {
  alignas(1024) typename Traits::Element b[cosize_v<typename Traits::SmemLayoutB>];
  int seen[Traits::kN];                        // largest exponents of the rows of p so far
  int exponent[kExponentBuffers][Traits::kN];  // the same as of a tile
};

template <class Traits, bool kConverts>
class WarpgroupProbabilityLoader {
 public:
  CUTE_DEVICE WarpgroupProbabilityLoader(WarpgroupStorage<Traits>& storage, int warp) : storage_(storage) {
    int lane = threadIdx.x % 32;
    if (lane < kRowsPerWarp) storage.seen[warp + lane * kWarpgroupWarps] = kLowest;  // only this warp uses those
    __syncwarp();
  }

  // Writes sB(row, column), a warp a row, two columns a lane. Rows beyond the last stay as they are: they reach
  // only accumulators that are never stored.
  template <class TensorB>
  CUTE_DEVICE void load(RingParams const& params, schedule::WorkTile const& work_tile, int tile, int warp, Stage stage,
                        TensorB&& sB /* (BLK_N,BLK_K) */, int buffer) {
    if constexpr (!kConverts) {
      load_as<Element>(params, work_tile, tile, warp, stage, sB, buffer);
    } else {
      visit_dtype(params.dense.dtype, [&](auto type) {
        using P = decltype(type);
        if constexpr (!std::is_same_v<P, Element>) load_as<P>(params, work_tile, tile, warp, stage, sB, buffer);
      });
    }
    cutlass::arch::fence_view_async_shared();
  }

  // Rescales accumulators to the scale of this tile's p; after a barrier of the warpgroup.
  template <class FragmentC>
  CUTE_DEVICE void rescale(bool is_first, int buffer, FragmentC& tCrC /* ((2,2,N/8),MMA_M,1) */) {
    if constexpr (!kScales) return;
    visit_columns([&](int n, int column) {
      int before = is_first ? kLowest : exponent(buffer == 0 ? kExponentBuffers - 1 : buffer - 1, n, column);
      int step = max(before - exponent(buffer, n, column), -2 * 126);
      if (!__any_sync(~0u, step != 0)) return;
      // Two factors: a step may be larger than one power of two can hold.
      multiply_column(tCrC, n, column, power_of_two(step / 2));
      multiply_column(tCrC, n, column, power_of_two(step - step / 2));
    });
  }

  // Rescales accumulators to the scale of p; `buffer` of the last tile.
  template <class FragmentC>
  CUTE_DEVICE void finish(int buffer, FragmentC& tCrC) {
    if constexpr (!kScales) return;
    visit_columns([&](int n, int column) {
      multiply_column(tCrC, n, column, power_of_two(exponent(buffer, n, column) - kTargetExponent));
    });
  }

 private:
  using Element = typename Traits::Element;
  static constexpr bool kScales = kConverts && std::is_same_v<Element, half_t>;
  static constexpr int kRowsPerWarp = Traits::kN / kWarpgroupWarps;

  WarpgroupStorage<Traits>& storage_;

  CUTE_DEVICE int exponent(int buffer, int n, int column) const {
    return storage_.exponent[buffer][8 * n + 2 * (threadIdx.x % 4) + column];
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
  CUTE_DEVICE void load_as(RingParams const& params, schedule::WorkTile const& work_tile, int tile, int warp,
                           Stage stage, TensorB& sB, int buffer) {
    int column = 2 * (threadIdx.x % 32);
    uchar2 token = {stage.token_order[Traits::TileFormat::position_of_column(column)],
                    stage.token_order[Traits::TileFormat::position_of_column(column + 1)]};
    if (params.has_p_map) {  // tokens beyond the last came as zeros
      constexpr int kRowElements =
          product::dense_row_elements(std::is_same_v<P, float> ? DType::kFloat32 : DType::kFloat16);
      auto const* p = reinterpret_cast<P const*>(stage.dense_rows) + warp * kRowElements;
      CUTE_UNROLL
      for (int i = 0; i < kRowsPerWarp; ++i, p += kWarpgroupWarps * kRowElements) {
        int row = warp + i * kWarpgroupWarps;
        if (row < work_tile.rows) store_row(row, p[token.x], p[token.y], sB, buffer);
      }
    } else {
      int64_t first_token = int64_t{tile - work_tile.tiles.begin} * format::kTileTokens;
      int64_t tokens = params.sparse.tokens - first_token;
      auto const* p = static_cast<P const*>(params.dense.data) + first_token + params.head_offset(work_tile);
      CUTE_NO_UNROLL
      for (int row = warp; row < work_tile.rows; row += kWarpgroupWarps) {
        auto const* from = p + params.row_offset(work_tile.first_row + row);
        store_row(row, token.x < tokens ? from[token.x] : P(0.f), token.y < tokens ? from[token.y] : P(0.f), sB,
                  buffer);
      }
    }
    if constexpr (kScales) {
      int row = warp + threadIdx.x % 32 * kWarpgroupWarps;
      if (row >= work_tile.rows && row < Traits::kN) storage_.exponent[buffer][row] = kLowest;
    }
  }

  template <class P, class TensorB>
  CUTE_DEVICE void store_row(int row, P p0, P p1, TensorB& sB, int buffer) {
    int lane = threadIdx.x % 32;
    float scale = 1;
    if constexpr (kScales) {  // a NaN needs no scale
      float largest = fmaxf(fmaxf(fabsf(float(p0)), fabsf(float(p1))), 0.f);
      int exponent = static_cast<int>(__reduce_max_sync(~0u, __float_as_uint(largest)) >> 23) - kExponentBias;
      exponent = max(storage_.seen[row], min(exponent, kExponentBias));
      scale = power_of_two(kTargetExponent - exponent);
      __syncwarp();
      if (lane == 0) storage_.seen[row] = storage_.exponent[buffer][row] = exponent;
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

}  // namespace cute_kernels::av::sm90
