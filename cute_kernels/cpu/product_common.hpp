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
  uint32_t const* begin = block(view, tile_index) + TileFormat::bitmap_rows(view.padded_head_dim) * format::kLanes;
  uint32_t const* end = block(view, tile_index) + view.rows(tile_index) * format::kLanes;
  return format::visit_codec(view.codec, [&](auto codec) {
    return std::all_of(begin, end, [&](uint32_t word) { return codec.all_finite(word); });
  });
}

// Every value that an 8-bit codec can store, as float.
template <class Codec>
std::array<float, 256> const& float_table(DType dtype) {
  static_assert(Codec::kValueBits == 8);
  auto make = [](DType x) {
    std::array<float, 256> table{};
    for (uint32_t stored = 0; stored < 256; ++stored) {
      uint16_t const bits = Codec::decode(stored, x);
      table[stored] = x == DType::kBFloat16 ? bfloat16_to_float(bits) : half_to_float(bits);
    }
    return table;
  };
  static std::array<float, 256> const of_half = make(DType::kFloat16), of_bfloat = make(DType::kBFloat16);
  return dtype == DType::kBFloat16 ? of_bfloat : of_half;
}

// As Kernels::unpack, for values of a codec that the kernels of kernels.hpp do not know.
template <class Codec>
void unpack_coded(uint32_t const* block, int bitmap_rows, int value_rows, DType dtype, UnpackedTile const& tile) {
  unpack_masks(block, bitmap_rows, tile.masks);
  std::array<float, 256> const& number = float_table<Codec>(dtype);
  uint32_t const* words = block + bitmap_rows * format::kLanes;
  for (int row = 0; row < value_rows; ++row)
    for (int lane = 0; lane < format::kLanes; ++lane, ++words)
      for (int s = 0; s < kStreams; ++s) {
        float* values = tile.streams + (lane * kStreams + s) * tile.stride + row * Codec::kValuesPerRow;
        for (int i = 0; i < Codec::kValuesPerRow; ++i) values[i] = number[Codec::extract(*words, s, i)];
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
    int const value_rows = view.rows(tile_index) - bitmap_rows_;
    format::visit_codec(view.codec, [&](auto codec) {
      using Codec = decltype(codec);
      if constexpr (Codec::kValueBits == 16)
        isa.unpack(from, bitmap_rows_, value_rows, view.dtype == DType::kBFloat16, tile);
      else
        unpack_coded<Codec>(from, bitmap_rows_, value_rows, view.dtype, tile);
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
    int const value_rows = std::max(view.max_tile_rows - bitmap_rows_, 0);
    return format::visit_codec(view.codec, [&](auto codec) { return value_rows * codec.kValuesPerRow; });
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
