// P^T of a tile as B fragments: tokens put in the tile's order, values brought to the element type of V.
//
// p in the type of V is taken as it is. bf16 holds every float's range, so for V in bf16 a conversion is enough. For V
// in fp16, p in fp32 or bf16 is scaled by a power of two per query row, such that the largest |p| seen so far falls in
// [2^14, 2^15); when a larger one comes, the row's accumulators are scaled down, as online softmax does. Values down to
// 2^-28 of the row's largest keep their full precision.
#pragma once

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/mma/scales.hpp"
#include "cute_kernels/mma/warp/traits.hpp"
#include "cute_kernels/ops/av/params.hpp"
#include "cute_kernels/ops/product/stage.hpp"

namespace cute_kernels::av {

using namespace cute;
using product::Stage;

inline constexpr int kExponentBias = 127;
inline constexpr int kTargetExponent = 14;                  // of the largest scaled |p|
inline constexpr int kLowest = -126 + kTargetExponent + 1;  // so that every scale is a normal number

CUTE_DEVICE float power_of_two(int exponent) {  // exponent in [-126, 127]
  return __int_as_float((exponent + kExponentBias) << 23);
}

// The rows' largest exponents, held as the accumulators are: columns 2 (lane % 4) + {0, 1} of every n8 block.
template <class Traits>
struct RowScales {
  static constexpr int kBlocks = Traits::kN / 8;
  int exponent[kBlocks][2];

  CUTE_DEVICE RowScales() {
    CUTE_UNROLL
    for (int n = 0; n < kBlocks; ++n) exponent[n][0] = exponent[n][1] = kLowest;
  }

  // Includes the largest |p| that this lane loads of its row in n8 block n. Returns the row's scale, with accumulators
  // rescaled to it.
  template <class Fragment>
  CUTE_DEVICE float rescale(float largest, int n, Fragment& tCrC /* ((2,2),MMA_M,MMA_N) */) {
    int lane = threadIdx.x % 32;
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    // A quad loads row lane / 4, but accumulates rows 2 (lane % 4) + {0, 1}.
    int seen = min(static_cast<int>(__float_as_uint(largest) >> 23) - kExponentBias, kExponentBias);
    CUTE_UNROLL
    for (int column = 0; column < 2; ++column) {
      int next = max(exponent[n][column], __shfl_sync(~0u, seen, 4 * (2 * (lane % 4) + column)));
      int step = max(exponent[n][column] - next, -2 * 126);
      exponent[n][column] = next;
      if (!__any_sync(~0u, step != 0)) continue;
      // Two factors: a step may be larger than one power of two can hold.
      float first = power_of_two(step / 2), second = power_of_two(step - step / 2);
      CUTE_UNROLL
      for (int m = 0; m < size<1>(tCrC); ++m) {
        tCrC(column, m, n) = tCrC(column, m, n) * first * second;
        tCrC(column + 2, m, n) = tCrC(column + 2, m, n) * first * second;
      }
    }
    int source = lane / 8;  // a lane that accumulates row lane / 4, as its column lane / 4 % 2
    int exponent0 = __shfl_sync(~0u, exponent[n][0], source), exponent1 = __shfl_sync(~0u, exponent[n][1], source);
    return power_of_two(kTargetExponent - (lane / 4 % 2 ? exponent1 : exponent0));
  }

  template <class Fragment>
  CUTE_DEVICE void undo(Fragment& tCrC /* ((2,2),MMA_M,MMA_N) */) const {
    CUTE_UNROLL
    for (int n = 0; n < kBlocks; ++n) {
      CUTE_UNROLL
      for (int column = 0; column < 2; ++column) {
        float factor = power_of_two(exponent[n][column] - kTargetExponent);
        CUTE_UNROLL
        for (int m = 0; m < size<1>(tCrC); ++m) tCrC(column, m, n) *= factor, tCrC(column + 2, m, n) *= factor;
      }
    }
  }
};

// The tokens of this lane's B fragments: bytes of two neighbouring positions.
template <class Traits>
struct LaneTokens {
  static constexpr int kBlocks = Traits::kTokens / 16;
  uint32_t pair[kBlocks][2];

  template <class Coords>
  CUTE_DEVICE LaneTokens(uint8_t const* token_order,
                         Coords const& tCcB /* ((2,2),MMA_N,MMA_K) -> (row, token_position) */) {
    CUTE_STATIC_ASSERT_V((shape<0>(tCcB) == Shape<_2, _2>{}));  // two neighbouring columns, then 8 further on
    CUTE_STATIC_ASSERT_V(size<2>(tCcB) == Int<kBlocks>{});
    CUTE_UNROLL
    for (int i = 0; i < 2 * kBlocks; ++i)
      pair[i / 2][i % 2] = *reinterpret_cast<uint16_t const*>(token_order + 8 * i + 2 * (threadIdx.x % 4));
  }
  // v: index in the fragment's first mode, k: block of 16 tokens
  CUTE_DEVICE int operator()(int v, int k) const {
    return pair[k][Traits::TileFormat::eight_of(v)] >> (8 * Traits::TileFormat::next_of(v)) & 0xff;
  }
};

// The scales of the same tokens, of a codec with scales: p is multiplied by them.
template <class Traits>
class ColumnScales {
 public:
  CUTE_DEVICE explicit ColumnScales(uint8_t const* block) {
    if constexpr (Traits::kHasScales) {
      // pairs_[i][k]: of positions 16 k + 2t + i and 8 more.
      constexpr int kBefore = Traits::TileFormat::scale_row(Traits::kHeadDim) * format::kRowBytes;
      static_assert(format::scale_index(16) == 2 && format::scale_index(8) == 1 && format::scale_index(1) == 8);
      auto const* from = reinterpret_cast<uint4 const*>(block + kBefore) + 2 * (threadIdx.x % 4);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        uint4 x = from[i];
        pairs_[i][0] = x.x, pairs_[i][1] = x.y, pairs_[i][2] = x.z, pairs_[i][3] = x.w;
      }
    }
  }
  // p of a token times its scale. v, k: as of LaneTokens
  CUTE_DEVICE float operator()(float p, int v, int k) const {
    if constexpr (!Traits::kHasScales) return p;
    float2 pair = mma::scale_pair(pairs_[Traits::TileFormat::next_of(v)][k]);
    return p * (Traits::TileFormat::eight_of(v) ? pair.y : pair.x);
  }

 private:
  uint32_t pairs_[2][Traits::kTokens / 16];
};

template <class Traits, bool kConverts>
class ProbabilityLoader {
 public:
  template <class FragmentB, class FragmentC>
  CUTE_DEVICE void load(Params const& params, schedule::WorkTile const& work_tile, Stage stage,
                        FragmentB& tCrB /* (MMA,MMA_N,MMA_K) */, FragmentC& tCrC /* (MMA,MMA_M,MMA_N) */) {
    if constexpr (!kConverts) {
      load_as<Element>(work_tile, stage, tCrB, tCrC);
    } else {
      visit_dtype(params.dense.dtype, [&](auto type) {
        if constexpr (Traits::kHasScales || !std::is_same_v<decltype(type), Element>)
          load_as<decltype(type)>(work_tile, stage, tCrB, tCrC);
      });
    }
  }

  // Rescales accumulators to the scale of p.
  template <class FragmentC>
  CUTE_DEVICE void finish(FragmentC& tCrC) const {
    if constexpr (kScales) scales_.undo(tCrC);
  }

 private:
  using Element = typename Traits::Element;
  static constexpr bool kScales = kConverts && std::is_same_v<Element, half_t>;
  struct Nothing {};
  std::conditional_t<kScales, RowScales<Traits>, Nothing> scales_;

  template <class P, class FragmentB, class FragmentC>
  CUTE_DEVICE void load_as(schedule::WorkTile const& work_tile, Stage stage, FragmentB& tCrB, FragmentC& tCrC) {
    constexpr int kRowBytes = product::dense_row_bytes(std::is_same_v<P, float> ? DType::kFloat32 : DType::kFloat16);
    auto thr_mma = typename Traits::TiledMma{}.get_slice(threadIdx.x % 32);
    Tensor cB =
        make_identity_tensor(Shape<Int<Traits::kN>, Int<Traits::kK>>{});  // (BLK_N,BLK_K) -> (row, token_position)
    Tensor tCcB = thr_mma.partition_B(cB);                                // ((2,2),MMA_N,MMA_K)
    CUTE_STATIC_ASSERT_V(shape(tCcB) == shape(tCrB));
    LaneTokens<Traits> token(stage.token_order, tCcB);
    ColumnScales<Traits> token_scale(stage.block);
    CUTE_UNROLL
    for (int n = 0; n < size<1>(tCrB); ++n) {
      int row = min(get<0>(tCcB(0, n, 0)), work_tile.rows - 1);  // rows beyond the last are computed and never stored
      auto const* p = reinterpret_cast<P const*>(stage.dense_rows + row * kRowBytes);
      float scale = 1;
      if constexpr (kScales) {
        float largest = 0;
        CUTE_UNROLL
        for (int k = 0; k < size<2>(tCrB); ++k) {
          CUTE_UNROLL
          for (int v = 0; v < 4; ++v)
            largest =
                fmaxf(largest, fabsf(token_scale(float(p[token(v, k)]), v, k)));  // ignores NaN: it needs no scale
        }
        scale = scales_.rescale(largest, n, tCrC);
      }
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tCrB); ++k) {
        CUTE_UNROLL
        for (int v = 0; v < 4; ++v) {
          if constexpr (std::is_same_v<P, Element> && !Traits::kHasScales)
            tCrB(v, n, k) = p[token(v, k)];
          else
            tCrB(v, n, k) = Element(token_scale(float(p[token(v, k)]), v, k) * scale);
        }
      }
    }
  }
};

}  // namespace cute_kernels::av
