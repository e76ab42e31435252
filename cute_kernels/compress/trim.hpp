// Streams that are too long for their slot.
#pragma once

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/compress/pack_tile.hpp"

namespace cute_kernels::compress {

// Drops, of every stream longer than `most`, the values of least magnitude, of equal ones the later. A thread a stream,
// which walks along its elements again for every bit of the greatest magnitude that it drops, kSmall: in little code.
template <bool kSmall>
struct Trim {
  int longest, most;  // streams of the tile
  uint32_t nan_key;
  int64_t* dropped;  // tiles, nonzeros

  template <class Part, class Group>
  __device__ void operator()(typename Part::Storage& s, Part& part, Group const& group) const {
    if (longest <= most) return;
    constexpr int kThreads = 32 * Part::Storage::kWarps;
    int thread = threadIdx.x % kThreads, lane = thread % 32, first_word = thread / 32 * Part::kWords;
    auto* words = reinterpret_cast<uint32_t (*)[kLanes]>(s.values);  // not in use yet
#pragma unroll
    for (int w = 0; w < Part::kWords; ++w) words[first_word + w][lane] = part.words[w];
    cute::cp_async_wait<0>();
    group.sync();
    for (int i = thread; i < kLanes * kStreams; i += kThreads) trim_stream<Part>(s, words, i % kLanes, i / kLanes);
    if (thread == 0) count(0, 1);
    group.sync();
#pragma unroll
    for (int w = 0; w < Part::kWords; ++w) part.words[w] = words[first_word + w][lane];
    group.sync();
  }

 private:
  __device__ void count(int which, int n) const {
    atomicAdd(reinterpret_cast<unsigned long long*>(dropped + which), static_cast<unsigned long long>(n));
  }

  template <class Part>
  __device__ void trim_stream(typename Part::Storage const& s, uint32_t (*words)[kLanes], int lane, int stream) const {
    constexpr int HeadDim = Part::kHeadDim, kElements = TileFormat::lane_elements(HeadDim);
    auto present = [&](int e) { return words[TileFormat::bitmap_word(e)][lane] >> Part::bit(e) & 1; };
    auto key = [&](int e) {
      int position = Part::position(lane, e), row = position / HeadDim;
      return magnitude_key(s.dense[row][swizzled(row, s.channel[position % HeadDim])], nan_key);
    };
    auto count_below = [&](uint32_t limit) {
      int n = 0;
#pragma unroll(kSmall ? 2 : 8)
      for (int e = stream; e < kElements; e += kStreams) n += present(e) & (key(e) < limit ? 1u : 0u);  // no branch
      return n;
    };
    int excess = 0, ties = 0;
    uint32_t last = 0;  // the greatest magnitude that is dropped, of which `ties` are
    if constexpr (kSmall) {
#pragma unroll 1
      for (int bit = kMagnitudeBits; bit >= 0; --bit) {  // all are counted first
        int below = count_below(last | 1u << bit);
        if (bit == kMagnitudeBits) {
          ties = excess = below - most;
          if (excess <= 0) return;
        } else if (below < excess) {
          last |= 1u << bit;
          ties = excess - below;
        }
      }
    } else {
      excess = count_below(~0u) - most;
      if (excess <= 0) return;
#pragma unroll 1
      for (uint32_t bit = 1u << (kMagnitudeBits - 1); bit; bit >>= 1)
        if (count_below(last | bit) < excess) last |= bit;
      ties = excess - count_below(last);
    }
#pragma unroll 1
    for (int e = kElements - kStreams + stream; e >= 0; e -= kStreams) {
      if (!present(e)) continue;
      uint32_t magnitude = key(e);
      if (magnitude > last || (magnitude == last && ties-- <= 0)) continue;
      atomicAnd(&words[TileFormat::bitmap_word(e)][lane],
                ~(1u << Part::bit(e)));  // the other stream has the same words
    }
    count(1, excess);
  }
};

}  // namespace cute_kernels::compress
