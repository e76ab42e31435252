// Channels to classes.
#pragma once

#include <cstdint>

#include "cute_kernels/format/tile/tile.hpp"

namespace cute_kernels::compress {

// The position of a channel: channels, densest first, ties by lower channel, are dealt to the classes back and forth.
__device__ inline int dealt_position(int32_t const* count, int channels, int channel) {
  int32_t mine = count[channel];
  int rank = 0;
#pragma unroll 8
  for (int other = 0; other < channels; ++other)
    rank += count[other] > mine || (count[other] == mine && other < channel);
  int offset = rank % format::kClasses;
  bool forth = rank / format::kClasses % 2 == 0;
  return rank - offset + (forth ? offset : format::kClasses - 1 - offset);
}

}  // namespace cute_kernels::compress
