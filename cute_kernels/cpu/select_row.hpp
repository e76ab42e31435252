// The magnitude selection of one token, for any simd type.
#pragma once

#include <cstdint>
#include <cstring>

namespace cute_kernels::cpu {
namespace {

constexpr int kMaxChannels = 256;

// Sets the bits of the `keep` largest keys, ties to the lower channel. Bisection finds the keep-th largest key bit by
// bit: the largest threshold that at least `keep` keys reach.
template <class Simd>
void mark_largest(uint16_t const* keys, int words, int keep, uint32_t* mask) {
  auto reach = [&](uint32_t threshold) {
    int n = 0;
    for (int w = 0; w < words; ++w) n += Simd::count(Simd::at_least(keys + 32 * w, static_cast<uint16_t>(threshold)));
    return n;
  };
  uint32_t threshold = 0;
  for (uint32_t bit = 1u << 14; bit; bit >>= 1)
    if (reach(threshold | bit) >= keep) threshold |= bit;
  int ties = keep - reach(threshold + 1);
  for (int w = 0; w < words; ++w) {
    uint32_t above = Simd::at_least(keys + 32 * w, static_cast<uint16_t>(threshold + 1));
    uint32_t equal = Simd::at_least(keys + 32 * w, static_cast<uint16_t>(threshold)) & ~above;
    for (; equal && ties > 0; --ties, equal &= equal - 1) above |= equal & (0u - equal);
    mask[w] = above;
  }
}

template <class Simd>
void select_row(uint16_t const* x, int head_dim, int padded_head_dim, bool bfloat16, int keep, uint32_t* mask,
                int32_t* counts, uint16_t* pruned) {
  alignas(64) uint16_t keys[kMaxChannels];
  uint16_t const nan_key = bfloat16 ? 0x7f81 : 0x7c01;  // every NaN is one key above infinity
  for (int c = 0; c < head_dim; ++c) {
    uint16_t magnitude = x[c] & 0x7fff;
    keys[c] = magnitude < nan_key ? magnitude : nan_key;
  }
  for (int c = head_dim; c < padded_head_dim; ++c) keys[c] = 0;

  int const words = padded_head_dim / 32;
  uint32_t nonzero[kMaxChannels / 32];
  for (int w = 0; w < words; ++w) nonzero[w] = Simd::at_least(keys + 32 * w, 1);
  if (keep == 0 || keep >= head_dim) {
    for (int w = 0; w < words; ++w) mask[w] = nonzero[w];
  } else {
    mark_largest<Simd>(keys, words, keep, mask);
    for (int w = 0; w < words; ++w) mask[w] &= nonzero[w];
  }
  if (counts)
    for (int w = 0; w < words; ++w)
      for (int i = 0; i < 32; ++i) counts[32 * w + i] += static_cast<int32_t>((mask[w] >> i) & 1);
  if (pruned) {
    alignas(64) uint16_t kept[kMaxChannels];
    for (int w = 0; w < words; ++w)
      for (int i = 0; i < 32; ++i) kept[32 * w + i] = static_cast<uint16_t>(0u - ((mask[w] >> i) & 1));
    for (int c = 0; c < head_dim; ++c) pruned[c] = x[c] & kept[c];
  }
}

}  // namespace
}  // namespace cute_kernels::cpu
