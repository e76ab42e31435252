// Online softmax of a consumer's rows. A thread has two of the 64 rows, lane / 4 and 8 further on of the warp's 16, a quad
// shares both.
//
// Whether a row's maximum has to be raised (rescaling.hpp) is asked of the largest exponent of both rows, compared as an
// integer: above a threshold that is not negative, floats have the order of their bits. Of integers an instruction takes
// the largest of three, so nearly all tiles pass with half the work of two floating-point maxima.
#pragma once

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/ops/attention/prefill/traits.hpp"
#include "cute_kernels/ops/attention/rescaling.hpp"

namespace cute_kernels::attention::prefill {

class Softmax {
 public:
  // scale_log2: not negative.
  CUTE_DEVICE explicit Softmax(float scale_log2) : scale_log2_(scale_log2) {}

  // The unnormalised probabilities in place of logits. Returns whether O is to be multiplied by factor().
  template <class FragmentS>
  CUTE_DEVICE bool step(FragmentS& tCrS /* ((2,2,N/8),1,1) */) {
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) for_row(tCrS, j, [&](float& s) { s = fmaf(s, scale_log2_, -max_[j]); });
    int limit = seen_[0] && seen_[1] ? __float_as_int(kRescaleThreshold) : INT_MIN;
    bool rescales = __any_sync(~0u, largest_bits(tCrS) > limit);
    if (rescales) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) raise(tCrS, j);
    }
    CUTE_UNROLL
    for (int n = 0; n < size<0, 2>(tCrS); ++n) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        float& s0 = tCrS(make_coord(0, j, n), 0, 0);
        float& s1 = tCrS(make_coord(1, j, n), 0, 0);
        s0 = ptx::exp2_approximate(s0), s1 = ptx::exp2_approximate(s1);
        sum_[j] += s0 + s1;
      }
    }
    return rescales;
  }

  CUTE_DEVICE float factor(int j) const { return factor_[j]; }

  // Of all tokens. row_sum is 0, and the log-sum-exp -infinity, where none has been seen.
  CUTE_DEVICE void finish() {
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      sum_[j] += __shfl_xor_sync(~0u, sum_[j], 1);
      sum_[j] += __shfl_xor_sync(~0u, sum_[j], 2);
    }
  }
  CUTE_DEVICE float row_sum(int j) const { return sum_[j]; }
  CUTE_DEVICE float log_sum_exp(int j) const {
    constexpr float kLn2 = 0.693147180559945f;
    return sum_[j] == 0 ? -INFINITY : (max_[j] + log2f(sum_[j])) * kLn2;
  }

 private:
  float scale_log2_;
  // max_ is of scaled logits, to base 2, and 0 until one has been seen; sums are of this thread's tokens.
  float max_[2] = {0, 0}, sum_[2] = {0, 0}, factor_[2];
  bool seen_[2] = {false, false};

  template <class FragmentS, class F>
  CUTE_DEVICE static void for_row(FragmentS& tCrS, int j, F&& f) {
    CUTE_UNROLL
    for (int n = 0; n < size<0, 2>(tCrS); ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) f(tCrS(make_coord(i, j, n), 0, 0));
    }
  }

  // In four chains, as many as hide an instruction's latency.
  template <class FragmentS>
  CUTE_DEVICE static int largest_bits(FragmentS const& tCrS) {
    constexpr int kChains = 4;
    auto bits = [&](int i) { return __float_as_int(tCrS(i)); };
    int largest[kChains];
    CUTE_UNROLL
    for (int i = 0; i < kChains; ++i) largest[i] = __vimax3_s32(bits(3 * i), bits(3 * i + 1), bits(3 * i + 2));
    CUTE_UNROLL
    for (int i = 3 * kChains; i < size(FragmentS{}); i += 2) {
      int& chain = largest[i / 2 % kChains];
      chain = __vimax3_s32(chain, bits(i), bits(i + 1));
    }
    static_assert(size(FragmentS{}) % 2 == 0 && kChains == 4);
    return max(__vimax3_s32(largest[0], largest[1], largest[2]), largest[3]);
  }

  template <class FragmentS>
  CUTE_DEVICE void raise(FragmentS& tCrS, int j) {
    float largest = -INFINITY;
    for_row(tCrS, j, [&](float s) { largest = fmaxf(largest, s); });
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    factor_[j] = 1;
    if (largest == -INFINITY || (seen_[j] && largest <= kRescaleThreshold)) return;
    if (seen_[j]) factor_[j] = ptx::exp2_approximate(-largest);
    seen_[j] = true;
    max_[j] += largest;
    sum_[j] *= factor_[j];
    for_row(tCrS, j, [&](float& s) { s -= largest; });
  }
};

}  // namespace cute_kernels::attention::prefill
