// All tiles in one line, cut into equal pieces of consecutive tiles, one a worker. Striped, so that no shape leaves SMs
// or workers idle; combine.hpp puts together what several pieces share. Or, where that is as even, cut at the segments'
// ends too, so that a cluster has all pieces of its segments.
#pragma once

#include "cute_kernels/matmul/params.hpp"

namespace cute_kernels::matmul {

struct TileRange {
  int begin, end;
};

// Pieces differ by one tile at most, the longer ones spread evenly. spare_tiles < pieces < 2^15, so the product fits.
CUTE_HOST_DEVICE int piece_begin(Work const& work, int piece) {
  int part, index;
  work.pieces(part, index, piece);
  return part * work.part_tiles + index * work.tiles_per_piece + work.pieces.div(index * work.spare_tiles);
}

CUTE_HOST_DEVICE TileRange piece_tiles(Work const& work, int piece) {
  return {piece_begin(work, piece), piece_begin(work, piece + 1)};
}

CUTE_HOST_DEVICE int piece_of_tile(Work const& work, int tile) {
  int part = tile / work.part_tiles, offset = tile - part * work.part_tiles;
  int piece = part * work.pieces.divisor + static_cast<int>(int64_t{offset} * work.pieces.divisor / work.part_tiles);
  while (piece_begin(work, piece + 1) <= tile) ++piece;
  return piece;
}

struct Segment {
  int index;
  int head;             // batch * kv_heads + kv_head
  int first_row, rows;  // of its block of query rows
  TileRange tiles;      // in the line
};

template <int N>
CUTE_HOST_DEVICE Segment segment_at(Work const& work, int index) {
  int head, block, tiles = work.tiles_per_segment.divisor;
  work.row_blocks(head, block, index);
  int first_row = block * N, rows = work.rows - first_row;
  return {index, head, first_row, rows < N ? rows : N, {index * tiles, (index + 1) * tiles}};
}

// Where the tile is in the storage.
CUTE_HOST_DEVICE int64_t storage_tile(Work const& work, int tile) {
  int segment, offset;
  work.tiles_per_segment(segment, offset, tile);
  return int64_t{work.row_blocks.div(segment)} * work.tiles_per_segment.divisor + offset;
}

// Where the rows of a KV head start in the dense operand, and where one of them lies from there.
CUTE_HOST_DEVICE int64_t dense_head_offset(DenseOperand const& dense, Work const& work, int head) {
  int batch, kv_head;
  work.kv_heads(batch, kv_head, head);
  return batch * dense.stride_batch + int64_t{kv_head} * work.group * dense.stride_head;
}

CUTE_HOST_DEVICE int64_t dense_row_offset(DenseOperand const& dense, Work const& work, int row) {
  int query_head, query_token;
  work.query_tokens(query_head, query_token, row);
  return query_head * dense.stride_head + query_token * dense.stride_token;
}

}  // namespace cute_kernels::matmul
