// What both products share: tasks over heads, blocks of query rows and ranges of tiles, and a tile's unpacked form.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "cute_kernels/cpu/cpu.hpp"
#include "cute_kernels/cpu/half.hpp"
#include "cute_kernels/cpu/kernels.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/cpu/parallel.hpp"
#include "cute_kernels/cpu/tile_shape.hpp"
#include "cute_kernels/cpu/two_of_four.hpp"

namespace cute_kernels::cpu {

inline constexpr int kRowsPerTask = 64;  // query rows that one unpacked tile serves

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Query rows of a KV head: (query head in the group, query token), contiguous in the output.
struct QueryRows {
  int group;
  int64_t per_head;  // rows of a KV head
  int64_t blocks;    // of kRowsPerTask rows

  QueryRows(SparseView const& view, DenseOperand const& operand)
      : group(operand.heads / view.kv_heads),
        per_head(group * operand.tokens),
        blocks(ceil_div(per_head, kRowsPerTask)) {}
};

// Row `row` of KV head `head` (batch index * kv_heads + KV head) of q or p, as an offset in elements.
inline int64_t row_offset(SparseView const& view, DenseOperand const& operand, int group, int64_t head, int64_t row) {
  int64_t const query_head = head % view.kv_heads * group + row / operand.tokens;
  return head / view.kv_heads * operand.stride_batch + query_head * operand.stride_head +
         row % operand.tokens * operand.stride_token;
}

inline void const* element_pointer(void const* data, DType dtype, int64_t offset) {
  return static_cast<char const*>(data) + offset * (dtype == DType::kFloat32 ? 4 : 2);
}

inline Number to_number(DType dtype) {
  static_assert(static_cast<int>(DType::kFloat16) == static_cast<int>(Number::kFloat16) &&
                static_cast<int>(DType::kBFloat16) == static_cast<int>(Number::kBFloat16) &&
                static_cast<int>(DType::kFloat32) == static_cast<int>(Number::kFloat32));
  return static_cast<Number>(dtype);
}

// The pair kernels if they serve this view, else null.
inline PairKernels const* pair_kernels(Kernels const& isa, SparseView const& view) {
  bool const whole_blocks = view.padded_head_dim / 4 % kPairBlock == 0;
  if (view.tile_format != TileFormat::kId) return nullptr;
  return view.codec == format::CodecId::kBf16 && whole_blocks ? isa.pairs : nullptr;
}

inline uint32_t const* block(SparseView const& view, int64_t tile_index) {
  return view.blocks + view.first_row(tile_index) * format::kLanes;
}

// The tile behind one of a contiguous storage, -1 behind the last.
inline int64_t next_tile(SparseView const& view, int64_t tile_index) {
  return tile_index + 1 < view.tiles() ? tile_index + 1 : -1;
}

inline bool has_finite_values(SparseView const& view, int64_t tile_index) {
  return format::visit_codec(view.codec, [&](auto codec) {
    using Codec = decltype(codec);
    uint32_t const* begin = block(view, tile_index);
    uint32_t const* end = begin + view.rows(tile_index) * format::kLanes;
    begin += (view.scale_row() + Codec::kScaleRows) * format::kLanes;
    return std::all_of(begin, end, [&](uint32_t word) { return Codec::all_finite(word); });
  });
}

// The scale of a token of a tile, by its position; 1 where the codec has no scales.
class TokenScales {
 public:
  TokenScales(SparseView const& view, int64_t tile_index)
      : scales_(view.channel_scale ? view.token_scales(block(view, tile_index)) : nullptr) {}
  explicit operator bool() const { return scales_; }
  float operator[](int position) const { return format::scale_value(scales_[format::scale_index(position)]); }

 private:
  uint16_t const* scales_;
};

// The scale of a head's channel, by its position; 1 where the codec has no scales. channel_order: the head's.
class ChannelScales {
 public:
  ChannelScales(SparseView const& view, uint8_t const* channel_order)
      : scales_(view.channel_scale ? view.channel_scale + (channel_order - view.channel_order) : nullptr) {}
  float operator[](int position) const { return scales_ ? format::scale_value(scales_[position]) : 1.f; }

 private:
  uint16_t const* scales_;
};

// The number of every code of a narrow codec.
template <class Codec>
std::array<float, 1 << Codec::kValueBits> const& number_table() {
  static auto const table = [] {
    std::array<float, 1 << Codec::kValueBits> numbers{};
    for (uint32_t code = 0; code < numbers.size(); ++code) numbers[code] = Codec::number(code);
    return numbers;
  }();
  return table;
}

// As Kernels::unpack, for a narrow codec: the numbers of its codes, without scales.
template <class Codec>
void unpack_codes(uint32_t const* block, int bitmap_rows, int value_rows, UnpackedTile const& tile) {
  unpack_masks<true>(block, bitmap_rows, tile.masks);
  auto const& number = number_table<Codec>();
  uint32_t const* words = block + (bitmap_rows + Codec::kScaleRows) * format::kLanes;
  for (int row = 0; row < value_rows; ++row)
    for (int lane = 0; lane < format::kLanes; ++lane, ++words) {
      float* values =
          tile.streams + (lane * kStreams + row % kStreams) * tile.stride + row / kStreams * Codec::kWordValues;
      for (int i = 0; i < Codec::kWordValues; ++i) values[i] = number[Codec::extract(*words, 0, i)];
    }
}

// Scratch that any tile of the view can be unpacked into, in either form.
class TileScratch {
 public:
  explicit TileScratch(SparseView const& view)
      : bitmap_rows_(TileFormat::bitmap_rows(view.padded_head_dim)),
        stride_((longest_stream(view) + 15) / 16 * 16 + kVectorPadding),
        masks_(static_cast<size_t>(bitmap_rows_) * kStreams * format::kLanes),
        streams_(static_cast<size_t>(format::kLanes) * kStreams * stride_) {}

  // next_tile: the one to be unpacked after this one, so that it is fetched meanwhile; -1: none.
  UnpackedTile unpack(Kernels const& isa, SparseView const& view, int64_t tile_index, int64_t next_tile) {
    prefetch(view, next_tile);
    UnpackedTile tile{masks_.data(), streams_.data(), stride_};
    uint32_t const* from = block(view, tile_index);
    if (view.tile_format != TileFormat::kId) {
      unpack_two_of_four(view, from, tile);
      return tile;
    }
    format::visit_codec(view.codec, [&](auto codec) {
      using Codec = decltype(codec);
      int const value_rows = view.rows(tile_index) - bitmap_rows_ - Codec::kScaleRows;
      if constexpr (Codec::kIsNarrow)
        unpack_codes<Codec>(from, bitmap_rows_, value_rows, tile);
      else
        isa.unpack(from, bitmap_rows_, value_rows, view.dtype == DType::kBFloat16, tile);
    });
    return tile;
  }

  // False: the pair kernels cannot multiply this tile.
  bool unpack_pairs(PairKernels const& pairs, SparseView const& view, int64_t tile_index, int64_t next_tile,
                    PairedTile& tile) {
    prefetch(view, next_tile);
    tile = {reinterpret_cast<uint32_t*>(masks_.data()), reinterpret_cast<uint16_t*>(streams_.data()), stride_};
    return pairs.unpack(block(view, tile_index), bitmap_rows_, view.rows(tile_index) - bitmap_rows_, tile);
  }

 private:
  // In values, at most.
  int longest_stream(SparseView const& view) const {
    if (view.tile_format != TileFormat::kId) return TileFormat::stream_elements(view.padded_head_dim);
    return format::visit_codec(view.codec, [&](auto codec) {
      return codec.most_values(std::max(view.max_tile_rows - bitmap_rows_ - codec.kScaleRows, 0));
    });
  }

  // Consecutive tiles mostly follow each other in memory, but 128-byte rows read in two passes are not what the
  // hardware prefetches well.
#if defined(__GNUC__)
  __attribute__((always_inline))  // GCC drops calls of a function that does nothing but prefetch
#endif
  static inline void prefetch(SparseView const& view, int64_t tile_index) {
#if defined(__GNUC__)
    if (tile_index < 0) return;
    uint32_t const* line = block(view, tile_index);
    uint32_t const* end = line + int64_t{view.rows(tile_index)} * format::kLanes;
    for (; line < end; line += 64 / sizeof *line) __builtin_prefetch(line);
#endif
  }

  int bitmap_rows_, stride_;
  AlignedArray<uint16_t> masks_;
  AlignedArray<float> streams_;
};

}  // namespace cute_kernels::cpu
