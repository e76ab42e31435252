// Channels to classes.
#pragma once

#include <cstdint>

#include "cute_kernels/format/tile/tile.hpp"

namespace cute_kernels::compress {

// How many channels come before this one: densest first, ties by lower channel.
__device__ inline int rank_by_count(int32_t const* count, int channels, int channel) {
  int32_t mine = count[channel];
  int rank = 0;
#pragma unroll 8
  for (int other = 0; other < channels; ++other)
    rank += count[other] > mine || (count[other] == mine && other < channel);
  return rank;
}

// The position of a channel: they are dealt to the classes back and forth.
__device__ inline int dealt_position(int32_t const* count, int channels, int channel) {
  int rank = rank_by_count(count, channels, channel);
  int offset = rank % format::kClasses;
  bool forth = rank / format::kClasses % 2 == 0;
  return rank - offset + (forth ? offset : format::kClasses - 1 - offset);
}

// The same by the rules of two of four: they are dealt to groups of four neighbours back and forth, where places rotate from
// group to group, so that every position modulo 8 has dense and empty channels alike. Channels beyond `channels` stay.
__device__ inline int grouped_position(int32_t const* count, int channels, int channel) {
  if (channel >= channels) return channel;
  int rank = rank_by_count(count, channels, channel), groups = channels / 4;
  int turn = rank / groups, place = rank % groups, group = turn % 2 == 0 ? place : groups - 1 - place;
  return 4 * group + (turn + group / 2) % 4;
}

}  // namespace cute_kernels::compress
