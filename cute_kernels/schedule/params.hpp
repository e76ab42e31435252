// What a schedule is made of; see schedule.hpp.
#pragma once

#include <cstdint>

#include "cute_kernels/schedule/partition.hpp"

namespace cute_kernels::schedule {

struct Params {
  int batch;                      // rows of the batch
  int kv_heads;                   // of a row of the batch
  int rows;                       // query rows of a KV head: group size x query tokens
  int tokens;                     // compressed ones of a sequence; with lengths, at most
  int window_tokens;              // dense ones that follow; with window_lengths, at most
  int32_t const* sequences;       // (batch): the sequence that a row of the batch attends to; null: the same row
  int32_t const* lengths;         // (sequences): compressed tokens that count; null: all
  int32_t const* window_lengths;  // (sequences): tokens of the window that count; null: all
  int workers;                    // of a CTA
  bool variable_length;           // KV tiles differ from sequence to sequence
  bool by_work_tile;              // every work tile is partitioned by itself
  bool in_cluster;                // likewise, and one cluster has all splits of it
  Partition partition;            // of all costs, unless variable_length; if by_work_tile of a work tile's KV tiles,
                                  // with variable_length as expected
  int longest_split;              // KV tiles of any split at most, unless variable_length
  cutlass::FastDivmod splits;     // of the schedule, or of a work tile if by_work_tile
  cutlass::FastDivmod tiles_per_work_tile;  // KV tiles; with variable_length at most
  cutlass::FastDivmod cost_per_work_tile;   // unless variable_length
  cutlass::FastDivmod work_tiles_per_row;   // of a row of the batch: KV heads x blocks of query rows
  cutlass::FastDivmod row_blocks;           // of a KV head

  CUTE_HOST_DEVICE int work_tiles() const { return batch * work_tiles_per_row.divisor; }
};

// KV tiles [begin, end) of the schedule.
struct Range {
  int begin, end;
};

struct WorkTile {
  int index;
  int row, sequence;  // of the batch, and where its tokens are stored
  int kv_head;
  int first_row, rows;  // of its block of query rows
  Range tiles;          // its KV tiles in the schedule
  int window_tiles;     // of them, the first
  int tokens, window_tokens;

  CUTE_HOST_DEVICE int window_end() const { return tiles.begin + window_tiles; }
};

}  // namespace cute_kernels::schedule
