// Online softmax over the tokens of a worker, and how P gets to the second product.
//
// Accumulators are S^T: tokens along M, query rows along N. A lane holds tokens lane / 4 (+ 8) of every 16 and rows
// 2 (lane % 4) + {0, 1} of every 8, the same rows of O^T: scaling O^T needs no exchange.
//
// P is 2 to the power of a logit less the row's row_max, the same in all of the worker's warps, and stays below
// 2^kRescaleThreshold, far within the range of fp16; see rescaling.hpp.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "cute_kernels/common/pack_halves.hpp"
#include "cute_kernels/mma/scales.hpp"
#include "cute_kernels/ops/attention/rescaling.hpp"
#include "cute_kernels/ops/attention/worker.hpp"

namespace cute_kernels::attention {

inline constexpr float kLargestProduct = 256;  // 2^8

// What P is multiplied by, token by token, before it multiplies values: the scales of a codec with scales, else nothing.
// The bound on P, and so on its exponent, is one on the product; sums are of P alone.
struct UnscaledValues {
  static constexpr bool kScaled = false;
  CUTE_DEVICE float exponent(float s, int, int) const { return s; }
  CUTE_DEVICE float scaled(float p, int, int) const { return p; }
};
template <class Traits>
struct ScaledValues {
  static constexpr bool kScaled = true;
  mma::LaneScales<Traits::kOwnTokenBlocks> scales;

  CUTE_DEVICE float exponent(float s, int m, int j) const { return s + ptx::log2_approximate(scales.of[m][j]); }
  CUTE_DEVICE float scaled(float p, int m, int j) const { return p * scales.of[m][j]; }
};

// An exponent above its row's threshold raises row_max: any until one has been seen.
template <int kRows>
struct ThresholdOfEachRow {
  float of_row[kRows];

  CUTE_DEVICE void reset(int i) { of_row[i] = -INFINITY; }
  CUTE_DEVICE void see(int i) { of_row[i] = kRescaleThreshold; }
  CUTE_DEVICE float operator[](int i) const { return of_row[i]; }
  // Above it an exponent is looked at more closely.
  CUTE_DEVICE float lowest(int i) const { return of_row[i]; }
};
// The same where values have scales: of products, above which exponents are looked at more closely.
template <int kRows>
struct ThresholdOfProducts {
  float of_row[kRows];

  CUTE_DEVICE void reset(int i) { of_row[i] = 0; }
  CUTE_DEVICE void see(int i) { of_row[i] = kLargestProduct; }
  CUTE_DEVICE float operator[](int i) const { return of_row[i] > 0 ? kRescaleThreshold : -INFINITY; }
  CUTE_DEVICE float lowest(int i) const { return (*this)[i]; }
  CUTE_DEVICE float product(int i) const { return of_row[i]; }
};
// The same of exponents in one register, which takes longer for all rows until each has seen one.
template <int kRows>
struct ThresholdOfAllRows {
  static constexpr uint32_t kAll = (1u << kRows) - 1;
  uint32_t seen = 0;  // a bit a row

  CUTE_DEVICE void reset(int i) { seen &= ~(1u << i); }
  CUTE_DEVICE void see(int i) { seen |= 1u << i; }
  CUTE_DEVICE float operator[](int i) const {
    uint32_t bit = seen >> i & 1;
    ptx::forget(bit);  // or all bits become predicates at once
    return bit ? kRescaleThreshold : -INFINITY;
  }
  CUTE_DEVICE float lowest(int) const { return seen == kAll ? kRescaleThreshold : -INFINITY; }
};

template <class Traits>
class OnlineSoftmax {
 public:
  static constexpr int kRows = 2 * Traits::kRowBlocks;  // of a lane

  CUTE_DEVICE OnlineSoftmax(Worker<Traits> const& worker, SharedP<Traits>& shared_p)
      : worker_(worker), shared_p_(shared_p) {
    reset();
  }

  CUTE_DEVICE void reset() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) threshold_.reset(i), row_max_[i] = row_sum_[i] = 0;
  }

  // The exponents of P in place of this warp's part of a tile's logits. scale_log2: the scale times log2 e.
  template <class FragmentS>
  CUTE_DEVICE void scale(FragmentS& tCrS /* ((2,2),own MMA_M,MMA_N) */, float scale_log2) const {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i)
      for_logits(tCrS, i, [&](float& s, int, int) { s = fmaf(s, scale_log2, -row_max_[i]); });
  }

  // The same of numbers of codes, times the scales of tokens and the rows' powers of two (mma/scales.hpp).
  template <class FragmentS, int kBlocks>
  CUTE_DEVICE void scale(FragmentS& tCrS, mma::LaneScales<kBlocks> const& scales,
                         float const (&row_scale)[kRows]) const {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i)
      for_logits(tCrS, i, [&](float& s, int m, int j) { s = fmaf(s * scales.of[m][j], row_scale[i], -row_max_[i]); });
  }

  // Takes this warp's exponents, -infinity for masked tokens; returns the tile's P as B fragments, and O^T rescaled
  // where row_max rose. dtype: of P, if its elements are bits.
  template <class FragmentS, class FragmentP, class FragmentO, class Values = UnscaledValues>
  CUTE_DEVICE void step(FragmentS& tCrS /* ((2,2),own MMA_M,MMA_N) */, TokenOrders const& orders,
                        FragmentP& tCrP /* ((2,2),MMA_N,MMA_K) */, FragmentO& tCrO /* ((2,2),own MMA_M,MMA_N) */,
                        Values const& values = {}, DType dtype = {}) {
    shared_p_.load(store<typename FragmentP::value_type>(tCrS, orders, tCrO, values, dtype), orders, tCrP);
  }

  // The same, but P stays in shared memory. Returns which of its buffers has it. Element: of P.
  template <class P, class FragmentS, class FragmentO, class Values = UnscaledValues>
  CUTE_DEVICE int store(FragmentS& tCrS /* ((2,2),own MMA_M,MMA_N) */, TokenOrders const& orders,
                        FragmentO& tCrO /* ((2,2),own MMA_M,MMA_N) */, Values const& values = {}, DType dtype = {}) {
    float sum[kRows];
    auto rises = [&] { return worker_.sync_any(store_p<P>(tCrS, orders, values, dtype, sum)); };
    // Relative to raised maxima none rises once more.
    if constexpr (Traits::kN == 8 || Traits::kHasScales) {
      // A loop: the code of P is there once. Others have no registers for it.
      CUTE_NO_UNROLL
      for (bool again = false; rises() && !again; again = true) rescale(tCrS, values, tCrO);
    } else if (rises()) {
      rescale(tCrS, values, tCrO);
      store_p<P>(tCrS, orders, values, dtype, sum);
      worker_.sync();
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) row_sum_[i] += sum[i];
    buffer_ ^= 1;
    return buffer_ ^ 1;
  }

  // Sums over all lanes and warps.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int lanes = 4; lanes < 32; lanes *= 2) row_sum_[i] += __shfl_xor_sync(~0u, row_sum_[i], lanes);
    }
    all_reduce(row_sum_, [](float a, float b) { return a + b; });
    worker_.sync();  // all have read
  }

  // -infinity where nothing has been seen.
  CUTE_DEVICE float row_max(int i) const { return threshold_[i] == -INFINITY ? -INFINITY : row_max_[i]; }
  CUTE_DEVICE float row_sum(int i) const { return row_sum_[i]; }

 private:
  Worker<Traits> const& worker_;
  SharedP<Traits>& shared_p_;
  int buffer_ = 0;
  // Of rows 8 n + 2 (lane % 4) + {0, 1}; sums are of this lane's tokens.
  float row_max_[kRows];
  std::conditional_t<Traits::kByWarpgroup, ThresholdOfAllRows<kRows>,
                     std::conditional_t<Traits::kHasScales, ThresholdOfProducts<kRows>, ThresholdOfEachRow<kRows>>>
      threshold_;
  float row_sum_[kRows];

  template <class FragmentS, class F>
  CUTE_DEVICE static void for_logits(FragmentS& tCrS, int row, F&& f) {
    CUTE_UNROLL
    for (int m = 0; m < size<1>(tCrS); ++m) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) f(tCrS(make_coord(row % 2, j), m, row / 2), m, j);
    }
  }

  // Element: of P. Returns whether an exponent of this lane's is above the threshold. With scales that is seen by the
  // product, which takes no logarithm; before the first exponent there is no product that is not.
  template <class Element, class FragmentS, class Values>
  CUTE_DEVICE bool store_p(FragmentS const& tCrS, TokenOrders const& orders, Values const& values, DType dtype,
                           float (&sum)[kRows]) {
    bool rises = false;
    if constexpr (!Values::kScaled) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i)
        for_logits(tCrS, i, [&](float s, int, int) { rises |= s > threshold_.lowest(i); });
    }
    Tensor tCrP = make_tensor<Element>(
        Shape<Shape<_2, _2>, Int<Traits::kRowBlocks>, Int<Traits::kOwnTokenBlocks>>{});  // ((2,2),MMA_N,own MMA_K)
    Tensor pairs = recast<uint32_t>(tCrP);                                               // (2,MMA_N,own MMA_K)
    CUTE_STATIC_ASSERT_V(size<2>(tCrP) == size<1>(tCrS));
    CUTE_UNROLL
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
      sum[2 * n] = sum[2 * n + 1] = 0;
      CUTE_UNROLL
      for (int m = 0; m < size<1>(tCrS); ++m) {
        CUTE_UNROLL
        for (int j = 0; j < 2; ++j) {
          float p[2];
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            p[i] = ptx::exp2_approximate(tCrS(make_coord(i, j), m, n));
            sum[2 * n + i] += p[i];
            p[i] = values.scaled(p[i], m, j);
            if constexpr (Values::kScaled) rises |= p[i] >= threshold_.product(2 * n + i);
          }
          SM75_U32x1_MOVM_T::copy(to_pair<Element>(p[0], p[1], dtype), pairs(j, n, m));
        }
        // The columns of V^T have positions 2t, 2t + 1 and 2t + 8, 2t + 9, or 2t, 2t + 8 and 2t + 1, 2t + 9.
        if constexpr (Traits::TileFormat::position_of_column(1) == 1) continue;
        uint32_t low = pairs(0, n, m), high = pairs(1, n, m);
        pairs(0, n, m) = ptx::permute_bytes(low, high, 0x5410);
        pairs(1, n, m) = ptx::permute_bytes(low, high, 0x7632);
      }
    }
    shared_p_.store(worker_, buffer_, orders, tCrP);
    return rises;
  }

  // Raises row_max to the largest logits seen, and rescales exponents, sums and O^T to it.
  template <class FragmentS, class Values, class FragmentO>
  CUTE_DEVICE void rescale(FragmentS& tCrS, Values const& values, FragmentO& tCrO) {
    float largest[kRows];  // exponents
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      largest[i] = fminf(threshold_[i], 0);
      for_logits(tCrS, i, [&](float s, int m, int j) { largest[i] = fmaxf(largest[i], values.exponent(s, m, j)); });
      CUTE_UNROLL
      for (int lanes = 4; lanes < 32; lanes *= 2)
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(~0u, largest[i], lanes));
    }
    all_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float rise = reduce::finite_max(largest[i]);
      if constexpr (Traits::kByWarpgroup) rise = largest[i] > threshold_[i] ? largest[i] : 0;
      float factor = ptx::exp2_approximate(-fmaxf(rise, 0));  // the first may be below 0, where there is no sum yet
      if (largest[i] > -INFINITY) threshold_.see(i);
      row_max_[i] += rise;
      for_logits(tCrS, i, [&](float& s, int, int) { s -= rise; });
      row_sum_[i] *= factor;
      CUTE_UNROLL
      for (int m = 0; m < size<1>(tCrO); ++m) {
        tCrO(make_coord(i % 2, 0), m, i / 2) *= factor;
        tCrO(make_coord(i % 2, 1), m, i / 2) *= factor;
      }
    }
  }

  // The warps' numbers put together, in the same order in all of them.
  template <class F>
  CUTE_DEVICE void all_reduce(float (&numbers)[kRows], F&& f) {
    if (threadIdx.x % 32 < 4) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) shared_p_.row_number(worker_.part, i) = numbers[i];
    }
    worker_.sync();
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      numbers[i] = shared_p_.row_number(0, i);
      CUTE_UNROLL
      for (int warp = 1; warp < Traits::kWorkerWarps; ++warp) numbers[i] = f(numbers[i], shared_p_.row_number(warp, i));
    }
  }
};

}  // namespace cute_kernels::attention
