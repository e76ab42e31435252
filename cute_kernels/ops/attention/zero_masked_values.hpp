// The values of masked tokens in the tiles that sequences end in.
#pragma once

#include <type_traits>

#include "cute_kernels/mma/decoder.hpp"
#include "cute_kernels/ops/attention/stage.hpp"
#include "cute_kernels/ops/attention/worker.hpp"

namespace cute_kernels::attention {

// A lane's column of a tile's block of values.
template <class Traits>
struct ValueColumn {
  using TileFormat = typename Traits::TileFormat;
  static_assert(Traits::Codec::kValueBits == 16, "a stream's value is half a word");
  static constexpr int kBitmapRows = TileFormat::bitmap_rows(Traits::kHeadDim);
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
    using Decoder = mma::Decoder<TileFormat, typename Traits::Codec>;
    auto last = Decoder::template first<Traits::kHeadDim, 2>(column, 2);  // behind both parts
#pragma unroll 4
    for (uint32_t at = column + kBitmapRows * format::kRowBytes; at <= max(last.low, last.high);
         at += format::kRowBytes)
      carried |= (ptx::load_shared_u32(at) & kExponents) + kLowestBits;  // a shorter stream is filled with zeros
    return carried & 0x80008000;
  }

  // Those of tokens from `tokens` on become zeros.
  CUTE_DEVICE void zero_from(uint8_t const* token_order, int tokens) const {
    auto layout = TileFormat::template element_layout<Role::kValue, Traits::kHeadDim>();
    int row[2] = {0, 0};
    CUTE_NO_UNROLL
    for (int e = 0; e < TileFormat::lane_elements(Traits::kHeadDim); ++e) {
      if (!(words[TileFormat::bitmap_word(e) * format::kLanes] >> TileFormat::bitmap_bit(e) & 1)) continue;
      int stream = TileFormat::stream(e), at = stream ? row[1]++ : row[0]++;
      if (token_order[layout(threadIdx.x % 32, e) / Traits::kHeadDim] >= tokens)
        values[at * (format::kRowBytes / 2) + stream] = 0;
    }
  }
};

// Makes zeros of a tile's values whose tokens are masked: infinity or NaN times a weight of 0 would be NaN. Where all
// values are finite, as nearly always, nothing has to be done; to see that takes far less time. With all warps of a
// worker.
template <class Traits>
CUTE_DEVICE void zero_masked_values(Worker<Traits> const& worker, Stage const& stage, int tokens) {
  ValueColumn<Traits> column(stage.block);
  if (worker.part == 0 && __any_sync(~0u, column.has_nonfinite())) column.zero_from(stage.token_order, tokens);
  worker.sync();
}

}  // namespace cute_kernels::attention
