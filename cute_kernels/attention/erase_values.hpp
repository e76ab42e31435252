// What the tiles need that sequences end in.
#pragma once

#include "cute_kernels/attention/traits.hpp"
#include "cute_kernels/attention/work.hpp"
#include "cute_kernels/common/ptx.hpp"

namespace cute_kernels::attention {

// Makes zeros of a tile's values whose tokens do not count, so that they cannot meet a weight of 0 as infinity or NaN.
// A lane changes its own streams.
template <class Traits>
CUTE_DEVICE void erase_values(uint8_t* block, uint8_t const* token_order, int tokens) {
  auto layout = format::element_layout<Role::kValue, Traits::kHeadDim>();
  int lane = threadIdx.x % 32;
  auto* words = reinterpret_cast<uint32_t*>(block) + lane;
  auto* values = reinterpret_cast<uint16_t*>(words + format::bitmap_rows(Traits::kHeadDim) * format::kLanes);
  int row[2] = {0, 0};
  CUTE_NO_UNROLL
  for (int e = 0; e < format::lane_elements(Traits::kHeadDim); ++e) {
    if (!(words[format::bitmap_word(e) * format::kLanes] >> format::bitmap_bit(e) & 1)) continue;
    int stream = format::Codec16::stream(e), at = stream ? row[1]++ : row[0]++;
    if (token_order[layout(lane, e) / Traits::kHeadDim] >= tokens) values[at * (format::kRowBytes / 2) + stream] = 0;
  }
}

}  // namespace cute_kernels::attention
