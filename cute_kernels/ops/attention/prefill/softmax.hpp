// Online softmax of a consumer's rows, whose maxima are raised as rescaling.hpp says. A thread has two of the 64 rows,
// lane / 4 and 8 further on of the warp's 16, a quad shares both.
#pragma once

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/ops/attention/prefill/traits.hpp"
#include "cute_kernels/ops/attention/rescaling.hpp"

namespace cute_kernels::attention::prefill {

// kScales: 2 where both rows have a scale of their own.
template <int kScales>
class Softmax {
 public:
  // scale_log2: of logits, times log2 e. Not negative.
  CUTE_DEVICE explicit Softmax(float scale_log2) {
    CUTE_UNROLL
    for (float& scale : scale_log2_) scale = scale_log2;
  }

  CUTE_DEVICE void multiply_scale(int j, float factor) { scale_log2_[j] *= factor; }

  // The unnormalised probabilities in place of logits. Returns whether O is to be multiplied by factor(). meanwhile():
  // when the maxima are known and exponentials begin.
  template <class FragmentS, class F>
  CUTE_DEVICE bool step(FragmentS& tCrS /* ((2,2,N/8),1,1) */, F&& meanwhile) {
    float largest[2];
    bool rises = false;
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      largest[j] = -INFINITY;
      for_row(tCrS, j, [&](float s) { largest[j] = fmaxf(largest[j], s); });
      rises |= largest[j] * scale(j) > threshold_[j];
    }
    bool rescales = __any_sync(~0u, rises);
    if (rescales) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) raise(j, largest[j]);
    }
    CUTE_UNROLL
    for (int n = 0; n < size<0, 2>(tCrS); ++n) {
      if (n == 1) meanwhile();
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        float& s0 = tCrS(make_coord(0, j, n), 0, 0);
        float& s1 = tCrS(make_coord(1, j, n), 0, 0);
        s0 = ptx::exp2_approximate(fmaf(s0, scale(j), -max_[j]));
        s1 = ptx::exp2_approximate(fmaf(s1, scale(j), -max_[j]));
        sum_[j] += s0 + s1;
      }
    }
    return rescales;
  }

  CUTE_DEVICE float factor(int j) const { return factor_[j]; }

  // Of all tokens. row_sum is 0 where none has been seen.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      sum_[j] += __shfl_xor_sync(~0u, sum_[j], 1);
      sum_[j] += __shfl_xor_sync(~0u, sum_[j], 2);
    }
  }
  CUTE_DEVICE float row_sum(int j) const { return sum_[j]; }
  CUTE_DEVICE float row_max(int j) const { return max_[j]; }
  // -infinity where no token has been seen.
  CUTE_DEVICE static float log_sum_exp(float row_max, float row_sum) {
    constexpr float kLn2 = 0.693147180559945f;
    return row_sum == 0 ? -INFINITY : (row_max + ptx::log2_approximate(row_sum)) * kLn2;
  }

 private:
  float scale_log2_[kScales];
  // Of scaled logits, to base 2. The threshold is -infinity until one has been seen; sums are of this thread's tokens.
  float max_[2] = {0, 0}, threshold_[2] = {-INFINITY, -INFINITY}, sum_[2] = {0, 0}, factor_[2];

  CUTE_DEVICE float scale(int j) const { return scale_log2_[j % kScales]; }

  template <class FragmentS, class F>
  CUTE_DEVICE static void for_row(FragmentS& tCrS, int j, F&& f) {
    CUTE_UNROLL
    for (int n = 0; n < size<0, 2>(tCrS); ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) f(tCrS(make_coord(i, j, n), 0, 0));
    }
  }

  CUTE_DEVICE void raise(int j, float largest) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    factor_[j] = 1;
    if (largest == -INFINITY) return;
    float scaled = largest * scale(j), raised = threshold_[j] == -INFINITY ? scaled : fmaxf(scaled, max_[j]);
    factor_[j] = ptx::exp2_approximate(threshold_[j] == -INFINITY ? 0 : max_[j] - raised);
    max_[j] = raised;
    threshold_[j] = raised + kRescaleThreshold;
    sum_[j] *= factor_[j];
  }
};

}  // namespace cute_kernels::attention::prefill
