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
  using Codec = typename Traits::Codec;
  static_assert(Codec::kValueBits >= 8, "a stream's value is whole bytes");
  using Value = std::conditional_t<Codec::kIsNarrow, uint8_t, uint16_t>;
  static constexpr int kFirstRow = TileFormat::template first_value_row<Codec>(Traits::kHeadDim);
  uint32_t* words;
  Value* values;

  CUTE_DEVICE explicit ValueColumn(uint8_t* block)
      : words(reinterpret_cast<uint32_t*>(block) + threadIdx.x % 32),
        values(reinterpret_cast<Value*>(words + kFirstRow * format::kLanes)) {}

  // Whether any value is infinity or NaN.
  CUTE_DEVICE bool has_nonfinite() const {
    uint32_t column = cast_smem_ptr_to_uint(words), begin = column + kFirstRow * format::kRowBytes;
    uint32_t carried = 0;  // out of an exponent, or a code, that is all ones
    auto last = mma::Decoder<TileFormat, Codec>::template first<Traits::kHeadDim, 2>(column, 2);  // behind both parts
    if constexpr (Codec::kIsNarrow) {
      int rows = Codec::value_rows(static_cast<int>(max(last.taken[0], last.taken[1])));
#pragma unroll 4
      for (uint32_t at = begin; at < begin + rows * format::kRowBytes; at += format::kRowBytes)
        carried |= (ptx::load_shared_u32(at) & 0x7f7f7f7fu) + 0x01010101u;
      return carried & 0x80808080u;
    } else {
      constexpr bool kHalf = std::is_same_v<typename Traits::Element, half_t>;
      constexpr uint32_t kExponents = kHalf ? 0x7c007c00 : 0x7f807f80, kLowestBits = kHalf ? 0x04000400 : 0x00800080;
#pragma unroll 4
      for (uint32_t at = begin; at <= max(last.low, last.high); at += format::kRowBytes)
        carried |= (ptx::load_shared_u32(at) & kExponents) + kLowestBits;  // a shorter stream is filled with zeros
      return carried & 0x80008000;
    }
  }

  // Those of tokens from `tokens` on become zeros.
  CUTE_DEVICE void zero_from(uint8_t const* token_order, int tokens) const {
    auto layout = TileFormat::template element_layout<Role::kValue, Traits::kHeadDim>();
    int row[2] = {0, 0};
    CUTE_NO_UNROLL
    for (int e = 0; e < TileFormat::lane_elements(Traits::kHeadDim); ++e) {
      int bit = TileFormat::template bitmap_bit<Codec::kBitDistance>(e);
      if (!(words[TileFormat::bitmap_word(e) * format::kLanes] >> bit & 1)) continue;
      int stream = TileFormat::stream(e), at = stream ? row[1]++ : row[0]++;
      if (token_order[layout(threadIdx.x % 32, e) / Traits::kHeadDim] >= tokens)
        values[Codec::value_row(stream, at) * (format::kRowBytes / static_cast<int>(sizeof(Value))) +
               Codec::first_bit(stream, at) / Codec::kValueBits] = 0;
    }
  }
};

// Makes zeros of a tile's values whose tokens are masked: infinity or NaN times a weight of 0 would be NaN. Where all
// values are finite, as nearly always, nothing has to be done; to see that takes far less time. With all warps of a
// worker.
template <class Traits>
CUTE_DEVICE void zero_masked_values(Worker<Traits> const& worker, Stage const& stage, int tokens) {
  if constexpr (Traits::kHasNonfinite) {
    ValueColumn<Traits> column(stage.block);
    if (worker.part == 0 && __any_sync(~0u, column.has_nonfinite())) column.zero_from(stage.token_order, tokens);
    worker.sync();
  }
}

}  // namespace cute_kernels::attention
