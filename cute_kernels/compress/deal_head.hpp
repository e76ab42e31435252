// Channels to classes.
#pragma once

#include <cstdint>

#include "cute_kernels/format/tile.hpp"

namespace cute_kernels::compress {

// Where a channel goes: channels, densest first, ties by lower channel, go to the classes back and forth.
__device__ inline int dealt_position(int32_t const* count, int channels, int channel) {
  int32_t mine = count[channel];
  int rank = 0;
#pragma unroll 8
  for (int other = 0; other < channels; ++other)
    rank += count[other] > mine || (count[other] == mine && other < channel);
  int place = rank % format::kClasses;
  bool forth = rank / format::kClasses % 2 == 0;
  return rank - place + (forth ? place : format::kClasses - 1 - place);
}

}  // namespace cute_kernels::compress
