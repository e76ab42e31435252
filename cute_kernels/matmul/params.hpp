// What the product kernels are called with.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::matmul {

// The dense operand: q of sparse_qk or p of sparse_av, (batch, heads, tokens, contiguous last mode), strides in
// elements.
struct DenseOperand {
  void const* data;
  int64_t stride_batch, stride_head, stride_token;
  format::DType dtype;
};

// All tiles in one line: segment after segment, a segment being (batch, KV head, block of N query rows).
// A query row is (query head in the group, query token); rows of a KV head are contiguous in the output.
struct Work {
  int tiles;                         // in the line
  int rows;                          // query rows of a KV head: group size x query tokens
  int group;                         // query heads of a KV head
  int part_tiles;                    // the line is cut into parts of so many tiles, itself or its segments,
  int tiles_per_piece, spare_tiles;  // and they into pieces, one a worker: part_tiles / pieces, part_tiles % pieces
  cutlass::FastDivmod pieces;        // of a part
  cutlass::FastDivmod tiles_per_segment, row_blocks, query_tokens, kv_heads;  // as divisors
  bool by_segments;  // parts are segments, and a cluster has all pieces of its segments
};

// How shared memory is divided; chosen on the host (dispatch/), the same for every worker.
struct Stages {
  int count;        // of a worker, or of all where they share one ring
  int block_bytes;  // room for one tile's block
  int stage_bytes;  // the block and behind it, in format::kRowsBehind rows or more, token order and rows of p
};

struct Params {
  format::SparseView sparse;
  DenseOperand dense;
  void* out;  // sparse_qk: (batch, query heads, query tokens, tokens); sparse_av: (..., head_dim)
  format::DType out_dtype;
  float scale;      // sparse_qk only
  bool vectorized;  // sparse_qk: out may be written in fours; sparse_av: every row of p starts on 16 bytes
  void* partials;   // sparse_av only: room for max_partials, see combine.hpp
  Work work;
  Stages stages;
};

}  // namespace cute_kernels::matmul
