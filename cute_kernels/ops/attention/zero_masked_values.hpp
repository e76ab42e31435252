// The values of masked tokens in the tiles that sequences end in.
#pragma once

#include <type_traits>

#include "cute_kernels/mma/decoder.hpp"
#include "cute_kernels/ops/attention/stage.hpp"
#include "cute_kernels/ops/attention/worker.hpp"

namespace cute_kernels::attention {

// Whether any value of some words is infinity or NaN.
template <class Traits>
struct Nonfinite {
  uint32_t carried = 0;  // out of an exponent, or a code, that is all ones

  CUTE_DEVICE void add(uint32_t word) {
    if constexpr (Traits::Codec::kIsNarrow) {
      carried |= (word & 0x7f7f7f7fu) + 0x01010101u;
    } else {
      constexpr bool kHalf = std::is_same_v<typename Traits::Element, half_t>;
      constexpr uint32_t kExponents = kHalf ? 0x7c007c00 : 0x7f807f80, kLowestBits = kHalf ? 0x04000400 : 0x00800080;
      carried |= (word & kExponents) + kLowestBits;
    }
  }
  CUTE_DEVICE explicit operator bool() const {
    return carried & (Traits::Codec::kIsNarrow ? 0x80808080u : 0x80008000u);
  }
};

// A lane's column of a tile's block of values under a bitmap.
template <class Traits>
struct ValueColumn {
  using TileFormat = typename Traits::TileFormat;
  using Codec = typename TileFormat::template Packed<typename Traits::Codec>;
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
    Nonfinite<Traits> found;
    auto last = mma::Decoder<TileFormat, typename Traits::Codec>::template first<Traits::kHeadDim, 2>(
        column, 2);  // behind both
    if constexpr (Codec::kIsNarrow) {
      int rows = Codec::value_rows(max(last.taken(0), last.taken(Codec::kStreams - 1)));
#pragma unroll 4
      for (uint32_t at = begin; at < begin + rows * format::kRowBytes; at += format::kRowBytes)
        found.add(ptx::load_shared_u32(at));
    } else {
#pragma unroll 4
      for (uint32_t at = begin; at <= max(last.low, last.high); at += format::kRowBytes)
        found.add(ptx::load_shared_u32(at));  // a shorter stream is filled with zeros
    }
    return bool(found);
  }

  // Those of tokens from `tokens` on become zeros.
  CUTE_DEVICE void zero_from(uint8_t const* token_order, int tokens) const {
    int row[2] = {0, 0};
    auto visit = [&](int word, int bit, int stream, auto&& token_position) {
      if (!(words[word * format::kLanes] >> bit & 1)) return;
      int at = stream ? row[1]++ : row[0]++;
      if (token_order[token_position()] >= tokens)
        values[Codec::value_row(stream, at) * (format::kRowBytes / static_cast<int>(sizeof(Value))) +
               Codec::first_bit(stream, at) / Codec::kValueBits] = 0;
    };
    auto layout = TileFormat::template element_layout<Role::kValue, Traits::kHeadDim>();
    int lane = threadIdx.x % 32;
    if constexpr (format::kIsTwoOfFour<TileFormat>) {
      CUTE_NO_UNROLL
      for (int slot = 0; slot < TileFormat::lane_slots(Traits::kHeadDim); ++slot) {
        int group = slot / TileFormat::kKept, index = slot % TileFormat::kKept;
        visit(TileFormat::metadata_rows(Traits::kHeadDim) + TileFormat::bitmap_word(slot),
              TileFormat::template bitmap_bit<typename Traits::Codec>(slot),
              TileFormat::template stream<typename Traits::Codec>(slot), [&] {
                auto place = TileFormat::metadata_place(Role::kValue, Traits::kHeadDim, lane, group);
                uint32_t kept = words[place.row * format::kLanes + place.lane - lane] >> place.bit;
                return layout(lane, TileFormat::kGroup * group) / Traits::kHeadDim + (kept >> (2 * index) & 3);
              });
      }
    } else {
      CUTE_NO_UNROLL
      for (int e = 0; e < TileFormat::lane_elements(Traits::kHeadDim); ++e)
        visit(TileFormat::bitmap_word(e), TileFormat::template bitmap_bit<Codec::kBitDistance>(e),
              TileFormat::stream(e), [&] { return layout(lane, e) / Traits::kHeadDim; });
    }
  }
};

// The same of exactly two of four, whose tokens have the order of memory.
template <class Traits>
struct PairColumn {
  using TileFormat = format::TwoOfFourTile;
  using Codec = typename Traits::Codec;
  static constexpr int kFirstRow = TileFormat::template first_value_row<Codec>(Traits::kHeadDim);
  static constexpr int kRows = TileFormat::template tile_rows<Codec>(Traits::kHeadDim);
  uint32_t* block;

  CUTE_DEVICE explicit PairColumn(uint8_t* block) : block(reinterpret_cast<uint32_t*>(block)) {}

  CUTE_DEVICE bool has_nonfinite() const {
    Nonfinite<Traits> found;
#pragma unroll 4
    for (int row = kFirstRow; row < kRows; ++row) found.add(block[row * format::kLanes + threadIdx.x % 32]);
    return bool(found);
  }

  CUTE_DEVICE void zero_from(uint8_t const*, int tokens) const {
    auto layout = TileFormat::template element_layout<Role::kValue, Traits::kHeadDim>();
    int lane = threadIdx.x % 32;
    CUTE_NO_UNROLL
    for (int group = 0; group < TileFormat::lane_groups(Traits::kHeadDim); ++group) {
      auto place = TileFormat::metadata_place(Role::kValue, Traits::kHeadDim, lane, group);
      uint32_t kept = block[place.row * format::kLanes + place.lane] >> place.bit;
      int token = layout(lane, TileFormat::kGroup * group) / Traits::kHeadDim;
      uint32_t& word = block[(kFirstRow + TileFormat::template value_row<Codec>(group)) * format::kLanes + lane];
      CUTE_NO_UNROLL
      for (int i = 0; i < TileFormat::kKept; ++i)
        if (token + static_cast<int>(kept >> (2 * i) & 3) >= tokens)
          word &= ~(((1u << Codec::kValueBits) - 1) << TileFormat::template first_bit<Codec>(group, i));
    }
  }
};

// Makes zeros of a tile's values whose tokens are masked: infinity or NaN times a weight of 0 would be NaN. Where all
// values are finite, as nearly always, nothing has to be done; to see that takes far less time. With all warps of a
// worker.
template <class Traits>
CUTE_DEVICE void zero_masked_values(Worker<Traits> const& worker, Stage const& stage, int tokens) {
  if constexpr (Traits::kHasNonfinite) {
    constexpr bool kHasBitmap = !std::is_same_v<typename Traits::TileFormat, format::TwoOfFourTile>;
    using Column = std::conditional_t<kHasBitmap, ValueColumn<Traits>, PairColumn<Traits>>;
    Column column(stage.block);
    if (worker.part == 0 && __any_sync(~0u, column.has_nonfinite())) column.zero_from(stage.token_order, tokens);
    worker.sync();
  }
}

}  // namespace cute_kernels::attention
