// Bit matrices in registers.
#pragma once

#include <cstdint>

#include "cute_kernels/common/ptx.hpp"

namespace cute_kernels::compress {

// The bits i of every byte of 8 words, i from 0 to 7: word p, bit i of a byte <- word i, bit p of that byte.
__device__ inline void transpose_bytes(uint32_t (&x)[8]) {
  constexpr uint32_t kMasks[] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu};
#pragma unroll
  for (int k = 2; k >= 0; --k) {
    int step = 1 << k;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & step) continue;
      uint32_t low = x[i], high = x[i + step];
      x[i] = ptx::blend(low, high << step, kMasks[k]);
      x[i + step] = ptx::blend(low >> step, high, kMasks[k]);
    }
  }
}

// 32 values of 16 bits to 16 planes: bit e of plane p is bit p of value e. interleaved(i, j): the bytes of values i and j
// in turn, lower ones first; i and j are both even or both odd.
template <class Interleaved>
__device__ void to_planes(Interleaved&& interleaved, uint32_t (&planes)[16]) {
  uint32_t low[8], high[8];  // byte c of word i: of value 8 c + i
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t first = interleaved(i, i + 8), last = interleaved(i + 16, i + 24);
    low[i] = ptx::permute_bytes(first, last, 0x5410);
    high[i] = ptx::permute_bytes(first, last, 0x7632);
  }
  transpose_bytes(low);
  transpose_bytes(high);
#pragma unroll
  for (int i = 0; i < 8; ++i) planes[i] = low[i], planes[i + 8] = high[i];
}

// Of values two a word in order.
__device__ inline void pairs_to_planes(uint32_t const (&pairs)[16], uint32_t (&planes)[16]) {
  to_planes([&](int i, int j) { return ptx::permute_bytes(pairs[i / 2], pairs[j / 2], i % 2 ? 0x7362 : 0x5140); },
            planes);
}

// Of values that value(i) loads, in no particular order.
template <class Value>
__device__ void values_to_planes(Value&& value, uint32_t (&planes)[16]) {
  to_planes([&](int i, int j) { return ptx::permute_bytes(value(i), value(j), 0x5140); }, planes);
}

// A matrix of 32 by 32 bits, a word a lane: bit i of lane l <- bit l of lane i.
__device__ inline uint32_t transpose_lanes(uint32_t x, int lane) {
  constexpr uint32_t kMasks[] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
#pragma unroll
  for (int k = 4; k >= 0; --k) {
    int step = 1 << k;
    uint32_t other = __shfl_xor_sync(~0u, x, step);
    bool upper = lane & step;
    // A lower lane keeps its low bits, and the other's low bits become its high ones; an upper lane does the reverse.
    uint32_t moved = __funnelshift_l(other, other, upper ? 32 - step : step);
    x = ptx::blend(x, moved, upper ? ~kMasks[k] : kMasks[k]);
  }
  return x;
}

}  // namespace cute_kernels::compress
