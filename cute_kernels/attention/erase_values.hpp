// What the tiles need that sequences end in.
#pragma once

#include <type_traits>

#include "cute_kernels/attention/traits.hpp"
#include "cute_kernels/attention/work.hpp"
#include "cute_kernels/common/ptx.hpp"

namespace cute_kernels::attention {

// Of a lane's streams in a tile's block of values.
template <class Traits>
struct ValueStreams {
  static constexpr int kBitmapRows = format::bitmap_rows(Traits::kHeadDim);
  uint32_t* words;
  uint16_t* values;

  CUTE_DEVICE explicit ValueStreams(uint8_t* block)
      : words(reinterpret_cast<uint32_t*>(block) + threadIdx.x % 32),
        values(reinterpret_cast<uint16_t*>(words + kBitmapRows * format::kLanes)) {}

  // Whether any value is infinity or NaN.
  CUTE_DEVICE bool has_nonfinite() const {
    constexpr uint16_t kExponent = std::is_same_v<typename Traits::Element, half_t> ? 0x7c00 : 0x7f80;
    constexpr uint32_t kFirst = format::stream_bits(0);
    int count[2] = {0, 0};
#pragma unroll 2
    for (int row = 0; row < kBitmapRows; ++row) {
      uint32_t word = words[row * format::kLanes];
      count[0] += __popc(word & kFirst), count[1] += __popc(word & ~kFirst);
    }
    bool found = false;
#pragma unroll 4
    for (int at = 0; at < max(count[0], count[1]); ++at) {
      uint32_t pair = words[(kBitmapRows + at) * format::kLanes];
      found |= at < count[0] && (pair & kExponent) == kExponent;
      found |= at < count[1] && (pair >> 16 & kExponent) == kExponent;
    }
    return found;
  }

  // Those of tokens from `tokens` on become zeros.
  CUTE_DEVICE void erase(uint8_t const* token_order, int tokens) const {
    auto layout = format::element_layout<Role::kValue, Traits::kHeadDim>();
    int row[2] = {0, 0};
    CUTE_NO_UNROLL
    for (int e = 0; e < format::lane_elements(Traits::kHeadDim); ++e) {
      if (!(words[format::bitmap_word(e) * format::kLanes] >> format::bitmap_bit(e) & 1)) continue;
      int stream = format::Codec16::stream(e), at = stream ? row[1]++ : row[0]++;
      if (token_order[layout(threadIdx.x % 32, e) / Traits::kHeadDim] >= tokens)
        values[at * (format::kRowBytes / 2) + stream] = 0;
    }
  }
};

// Makes zeros of a tile's values whose tokens do not count, so that they cannot meet a weight of 0 as infinity or NaN.
// Where all values are finite, as nearly always, nothing has to be done; to see that takes far less time.
template <class Traits>
CUTE_DEVICE void erase_values(uint8_t* block, uint8_t const* token_order, int tokens) {
  ValueStreams<Traits> streams(block);
  if (__any_sync(~0u, streams.has_nonfinite())) streams.erase(token_order, tokens);
}

}  // namespace cute_kernels::attention
