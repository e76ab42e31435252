// What the prefill kernel is called with.
#pragma once

#include <cutlass/fast_math.h>

#include "cute_kernels/ops/attention/problem.hpp"

namespace cute_kernels::attention::prefill {

inline constexpr int kOrderBytes = format::kTileTokens;

struct Params : Problem {
  int group;                         // query heads of a KV head
  int rows;                          // of a KV head: group x query tokens; packed: at most
  cutlass::FastDivmod query_tokens;  // query row of a KV head -> (query head of the group, query token), unless packed
  cutlass::FastDivmod row_blocks;    // of a KV head: work tiles of a cluster that shares decoded tiles
  cutlass::FastDivmod splits;        // of a KV head's tokens
  bool merges;                       // the CTAs of a cluster have all splits of a work tile, and merge them
  cutlass::FastDivmod kv_heads;      // of the keys
  bool q_vectorized;                 // rows of q may be read 16 bytes at a time
  bool window_vectorized;            // so may those of the window
  bool separate_orders;              // keys and values were not compressed together: each has its token order
  bool zero_masked;                  // sequences may end within a tile whose further tokens are stored
  int block_stages, stage_bytes;     // of a decoder
  void* partial_out;                 // (splits, rows of out, head_dim) fp32, and
  float* partial_lse;                // (splits, rows of out); null with one split, or if they are merged

  CUTE_HOST_DEVICE int64_t all_rows() const {
    return int64_t{q_heads} * (packed.starts ? packed.tokens : int64_t{batch} * q_tokens);
  }
};

}  // namespace cute_kernels::attention::prefill
