// What both products share: tasks over heads, blocks of query rows and runs of tiles, and a tile's unpacked form.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cute_kernels/cpu/cpu.hpp"
#include "cute_kernels/cpu/half.hpp"
#include "cute_kernels/cpu/kernels.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/cpu/parallel.hpp"

namespace cute_kernels::cpu {

inline constexpr int kRowsPerTask = 64;  // query rows that one unpacked tile serves

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Query rows of a KV head: (query head in the group, query token), contiguous in the output.
struct QueryRows {
  int group;
  int64_t per_head;  // rows of a KV head
  int64_t blocks;    // of kRowsPerTask rows

  QueryRows(const SparseView& view, const DenseOperand& operand)
      : group(operand.heads / view.kv_heads),
        per_head(group * operand.tokens),
        blocks(ceil_div(per_head, kRowsPerTask)) {}
};

// Row `row` of KV head `head` (batch index * kv_heads + KV head) of q or p, as an offset in elements.
inline int64_t row_offset(const SparseView& view, const DenseOperand& operand, int group, int64_t head, int64_t row) {
  const int64_t query_head = head % view.kv_heads * group + row / operand.tokens;
  return head / view.kv_heads * operand.stride_batch + query_head * operand.stride_head +
         row % operand.tokens * operand.stride_token;
}

inline const void* element_pointer(const void* data, DType dtype, int64_t offset) {
  return static_cast<const char*>(data) + offset * (dtype == DType::kFloat32 ? 4 : 2);
}

inline Number to_number(DType dtype) {
  static_assert(static_cast<int>(DType::kFloat16) == static_cast<int>(Number::kFloat16) &&
                static_cast<int>(DType::kBFloat16) == static_cast<int>(Number::kBFloat16) &&
                static_cast<int>(DType::kFloat32) == static_cast<int>(Number::kFloat32));
  return static_cast<Number>(dtype);
}

// The pair kernels if they serve this view, else null.
inline const PairKernels* pair_kernels(const Kernels& isa, const SparseView& view) {
  const bool whole_blocks = view.padded_head_dim / 4 % kPairBlock == 0;
  return view.dtype == DType::kBFloat16 && whole_blocks ? isa.pairs : nullptr;
}

inline const uint32_t* block(const SparseView& view, int64_t tile_index) {
  return view.blocks + view.first_row(tile_index) * format::kLanes;
}

// The tile behind one of a contiguous storage, -1 behind the last.
inline int64_t next_tile(const SparseView& view, int64_t tile_index) {
  return tile_index + 1 < view.tiles() ? tile_index + 1 : -1;
}

// Scratch that any tile of the view can be unpacked into, in either form.
class TileScratch {
 public:
  explicit TileScratch(const SparseView& view)
      : bitmap_rows_(format::bitmap_rows(view.padded_head_dim)),
        stride_((std::max(view.max_tile_rows - bitmap_rows_, 0) + 15) / 16 * 16 + kVectorPadding),
        masks_(static_cast<size_t>(bitmap_rows_) * kStreams * format::kLanes),
        streams_(static_cast<size_t>(format::kLanes) * kStreams * stride_) {}

  // next_tile: the one to be unpacked after this one, so that it is fetched meanwhile; -1: none.
  UnpackedTile unpack(const Kernels& isa, const SparseView& view, int64_t tile_index, int64_t next_tile) {
    prefetch(view, next_tile);
    UnpackedTile tile{masks_.data(), streams_.data(), stride_};
    isa.unpack(block(view, tile_index), bitmap_rows_, view.rows(tile_index) - bitmap_rows_,
               view.dtype == DType::kBFloat16, tile);
    return tile;
  }

  // False: this tile is none for pairs.
  bool unpack_pairs(const PairKernels& pairs, const SparseView& view, int64_t tile_index, int64_t next_tile,
                    PairedTile& tile) {
    prefetch(view, next_tile);
    tile = {reinterpret_cast<uint32_t*>(masks_.data()), reinterpret_cast<uint16_t*>(streams_.data()), stride_};
    return pairs.unpack(block(view, tile_index), bitmap_rows_, view.rows(tile_index) - bitmap_rows_, tile);
  }

 private:
  // The tiles of a run mostly follow each other, but 128-byte rows read in two passes are not what the hardware
  // prefetches well.
#if defined(__GNUC__)
  __attribute__((always_inline))  // GCC drops calls of a function that does nothing but prefetch
#endif
  static inline void prefetch(const SparseView& view, int64_t tile_index) {
#if defined(__GNUC__)
    if (tile_index < 0) return;
    const uint32_t* line = block(view, tile_index);
    const uint32_t* end = line + int64_t{view.rows(tile_index)} * format::kLanes;
    for (; line < end; line += 64 / sizeof *line) __builtin_prefetch(line);
#endif
  }

  int bitmap_rows_, stride_;
  AlignedArray<uint16_t> masks_;
  AlignedArray<float> streams_;
};

}  // namespace cute_kernels::cpu
