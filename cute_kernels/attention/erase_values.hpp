// What the tiles need that sequences end in.
#pragma once

#include <type_traits>

#include "cute_kernels/attention/stage.hpp"
#include "cute_kernels/attention/worker.hpp"
#include "cute_kernels/matmul/decompress.hpp"

namespace cute_kernels::attention {

// A lane's column of a tile's block of values.
template <class Traits>
struct ValueColumn {
  static constexpr int kBitmapRows = format::bitmap_rows(Traits::kHeadDim);
  uint32_t* words;
  uint16_t* values;

  CUTE_DEVICE explicit ValueColumn(uint8_t* block)
      : words(reinterpret_cast<uint32_t*>(block) + threadIdx.x % 32),
        values(reinterpret_cast<uint16_t*>(words + kBitmapRows * format::kLanes)) {}

  // Whether any value is infinity or NaN.
  CUTE_DEVICE bool has_nonfinite() const {
    constexpr bool kHalf = std::is_same_v<typename Traits::Element, half_t>;
    constexpr uint32_t kExponents = kHalf ? 0x7c007c00 : 0x7f807f80, kLowestBits = kHalf ? 0x04000400 : 0x00800080;
    uint32_t column = cast_smem_ptr_to_uint(words), carried = 0;  // out of an exponent that is all ones
    matmul::StreamCursor last = matmul::first_values_of_part<Traits::kHeadDim, 2>(column, 2);  // behind both parts
#pragma unroll 4
    for (uint32_t at = column + kBitmapRows * format::kRowBytes; at <= max(last.low, last.high);
         at += format::kRowBytes)
      carried |= (ptx::load_shared_u32(at) & kExponents) + kLowestBits;  // a shorter stream is filled with zeros
    return carried & 0x80008000;
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
// Where all values are finite, as nearly always, nothing has to be done; to see that takes far less time. With all
// warps of a worker.
template <class Traits>
CUTE_DEVICE void erase_values(Worker<Traits> const& worker, Stage const& stage, int tokens) {
  ValueColumn<Traits> column(stage.block);
  if (worker.part == 0 && __any_sync(~0u, column.has_nonfinite())) column.erase(stage.token_order, tokens);
  worker.sync();
}

}  // namespace cute_kernels::attention
