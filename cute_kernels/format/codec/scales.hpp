// The scales of narrow codecs, the same bits on every backend. All are positive bf16 numbers: the upper half of a float.
// A code's number times both is exact in float.
//
// A channel's, which goes into q and into the output, evens channels of different size out. It is the mean magnitude of
// the channel's nonzeros among the first tokens of a cache. A token's takes care of everything else: of what the token
// keeps, the largest |x| / channel's scale is no more than the codec's largest number times it.
#pragma once

#include "cute_kernels/common/dtype.hpp"
#include "cute_kernels/format/codec/narrow.hpp"

namespace cute_kernels::format {

inline constexpr int kScaleTokens = 8 * kTileTokens;  // of a cache, from which the scales of channels are chosen
inline constexpr int kScaleSums = 32;                 // that a channel's magnitudes are added up in
inline constexpr uint16_t kScaleOfOne = 0x3f80;
inline constexpr int kMaxScaleLog2 = 48;          // a token's scale is within 2^-48 and 2^48
inline constexpr int kMaxChannelScaleLog2 = 100;  // a channel's within 2^-100 and 2^100
inline constexpr int kLeastOfHeadLog2 = 10;       // and no less than 2^-10 of its head's largest

CUTE_HOST_DEVICE float scale_value(uint16_t scale) { return bits_float(uint32_t{scale} << 16); }

// Where in the scale row of a block, of 16-bit entries, a token's scale is. A lane's accumulators are of tokens whose
// positions have the same remainder by 8.
CUTE_HOST_DEVICE constexpr int scale_index(int token_position) {
  return token_position % kClasses * (kTileTokens / kClasses) + token_position / kClasses;
}

// A scale within bounds, rounded up or to the nearest one, of two to the even one.
template <bool kUp, int kMostLog2>
CUTE_HOST_DEVICE uint16_t to_scale(float x) {
  constexpr uint32_t kMost = (127u + kMostLog2) << 7, kLeast = (127u - kMostLog2) << 7;
  uint32_t const bits = float_bits(x), scale = (bits + (kUp ? 0xffffu : 0x7fffu + (bits >> 16 & 1))) >> 16;
  return static_cast<uint16_t>(scale < kLeast ? kLeast : scale > kMost ? kMost : scale);
}

// A channel's nonzero finite magnitudes among every kScaleSums-th token, in their order; then the sums of all those, in
// their order.
struct ChannelSum {
  float sum = 0;
  int count = 0;

  CUTE_HOST_DEVICE void add(float magnitude) {
    if (!(magnitude > 0) || magnitude == bits_float(0x7f800000u)) return;
    sum += magnitude;
    ++count;
  }
  CUTE_HOST_DEVICE void add(ChannelSum const& other) { sum += other.sum, count += other.count; }
  // 0 if there was none.
  CUTE_HOST_DEVICE uint16_t scale() const {
    return count == 0 ? uint16_t{0} : to_scale<false, kMaxChannelScaleLog2>(sum / static_cast<float>(count));
  }
};

// A channel's scale beside others of its head. own: of its sum, 0 if it has no nonzero, and then it takes the largest;
// most: the largest of those, 0 if there is none. The prefill kernel divides dense tokens by it and rounds them to fp16: a
// channel must not be so quiet that those of a louder time are out of range.
CUTE_HOST_DEVICE uint16_t channel_scale(uint16_t own, uint16_t most) {
  if (most == 0) return kScaleOfOne;
  uint16_t const least = static_cast<uint16_t>(most - (kLeastOfHeadLog2 << 7));
  return own == 0 ? most : own < least ? least : own;
}
static_assert(kMaxChannelScaleLog2 + kLeastOfHeadLog2 < 127);  // a normal number

// largest: of |x| / channel's scale of what a token keeps. If that is nothing, the scale is the least: products that are
// rounded relative to the largest of several tokens must not lose others' beside it.
CUTE_HOST_DEVICE uint16_t token_scale(float largest, float codec_largest) {
  return to_scale<true, kMaxScaleLog2>(largest / codec_largest);
}

// What a codec's `encode` takes for an x: relative to both scales, by their reciprocals. Two roundings of float at most;
// never contracted with a sum that follows, which would make one of them.
CUTE_HOST_DEVICE float scaled_down(float x, float per_channel_scale, float per_token_scale) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(__fmul_rn(x, per_channel_scale), per_token_scale);
#else
  return x * per_channel_scale * per_token_scale;
#endif
}

// What decompression gives for a code's number, as a float that is to be rounded to x's dtype: no larger than its
// largest number.
CUTE_HOST_DEVICE float scaled_up(float number, float token_scale, float channel_scale, DType dtype) {
  float const largest = dtype == DType::kFloat16 ? 65504.f : bits_float(0x7f7f0000u);
  float const x = number * token_scale * channel_scale;
  return x > largest ? largest : x < -largest ? -largest : x;
}

}  // namespace cute_kernels::format
