// The scales of narrow codecs.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "cute_kernels/cpu/cpu.hpp"
#include "cute_kernels/cpu/half.hpp"
#include "cute_kernels/cpu/parallel.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kTileTokens;

float to_float(uint16_t bits, DType dtype) {
  return dtype == DType::kBFloat16 ? bfloat16_to_float(bits) : half_to_float(bits);
}

// Of one token: its scale, and what cannot be stored.
struct TokenScale {
  uint16_t scale;
  int refused;
};

TokenScale token_scale_of(uint16_t const* x, uint32_t const* mask, int head_dim, DType dtype, bool has_nan,
                          float codec_largest, float const* per_channel) {
  float largest = 0;
  int refused = 0;
  for (int c = 0; c < head_dim; ++c) {
    if (!(mask[c / 32] >> (c % 32) & 1)) continue;
    float const exact = to_float(x[c], dtype);
    float const ratio = std::fabs(exact) * per_channel[c];
    if (std::isnan(exact))
      refused += !has_nan;
    else if (std::isinf(exact))
      ++refused;
    else if (ratio > largest)
      largest = ratio;
  }
  return {format::token_scale(largest, codec_largest), refused};
}

}  // namespace

int tile_token_scales(DenseView const& x, int64_t head, int64_t first_token, uint32_t const* masks, format::CodecId id,
                      float const* per_channel, uint16_t* token_scale) {
  int const mask_words = format::padded_head_dim(x.head_dim) / 32;
  int refused = 0;
  format::visit_codec(id, [&](auto codec) {
    if constexpr (decltype(codec)::kHasScales)
      for (int i = 0; i < kTileTokens; ++i) {
        TokenScale result{format::token_scale(0, codec.kLargest), 0};
        if (first_token + i < x.tokens)
          result = token_scale_of(x.row(head, first_token + i), masks + int64_t{i} * mask_words, x.head_dim, x.dtype,
                                  codec.kHasNan, codec.kLargest, per_channel);
        token_scale[i] = result.scale;
        refused += result.refused;
      }
  });
  return refused;
}

void channel_scales(DenseView const& x, uint16_t* channel_scale, int threads) {
  int const padded = format::padded_head_dim(x.head_dim);
  int64_t const tokens = std::min<int64_t>(x.tokens, format::kScaleTokens);
  parallel(threads, int64_t{x.batch} * x.kv_heads, [&](TaskQueue& queue) {
    std::vector<format::ChannelSum> sums(padded * format::kScaleSums);
    for (int64_t head; (head = queue.next()) >= 0;) {
      std::fill(sums.begin(), sums.end(), format::ChannelSum{});
      for (int64_t t = 0; t < tokens; ++t)
        for (int c = 0; c < x.head_dim; ++c)
          sums[t % format::kScaleSums * padded + c].add(std::fabs(to_float(x.row(head, t)[c], x.dtype)));
      for (int i = 1; i < format::kScaleSums; ++i)
        for (int c = 0; c < padded; ++c) sums[c].add(sums[i * padded + c]);
      uint16_t most = 0;
      for (int c = 0; c < padded; ++c) most = std::max(most, sums[c].scale());
      for (int c = 0; c < padded; ++c) channel_scale[head * padded + c] = format::channel_scale(sums[c].scale(), most);
    }
  });
}

int64_t token_scales(DenseView const& x, uint32_t const* masks, format::CodecId id, uint16_t const* channel_scale,
                     uint16_t* token_scale, int threads) {
  int const padded = format::padded_head_dim(x.head_dim);
  int64_t const tiles = (x.tokens + kTileTokens - 1) / kTileTokens;
  std::atomic<int64_t> refused{0};
  parallel(threads, int64_t{x.batch} * x.kv_heads * tiles, [&](TaskQueue& queue) {
    std::vector<float> per_channel(padded);
    for (int64_t tile; (tile = queue.next()) >= 0;) {
      int64_t const head = tile / tiles, first_token = tile % tiles * kTileTokens;
      for (int c = 0; c < padded; ++c) per_channel[c] = 1 / format::scale_value(channel_scale[head * padded + c]);
      refused += tile_token_scales(x, head, first_token, masks + (head * x.tokens + first_token) * (padded / 32), id,
                                   per_channel.data(), token_scale + tile * kTileTokens);
    }
  });
  return refused;
}

}  // namespace cute_kernels::cpu
