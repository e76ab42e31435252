// What the attention kernels are called with.
#pragma once

#include "cute_kernels/ops/attention/problem.hpp"
#include "cute_kernels/pipeline/config.hpp"
#include "cute_kernels/reduce/partial.hpp"
#include "cute_kernels/schedule/params.hpp"

namespace cute_kernels::attention {

inline constexpr int kOrderBytes = format::kTileTokens;
inline constexpr int kStageOrders = 2;  // token orders that a stage has bytes for

// Of what comes with a tile in a stage: token orders, and with keys the scales of the tokens of their values.
constexpr int stage_extra_bytes(bool has_scales) {
  return kStageOrders * kOrderBytes + (has_scales ? format::kRowBytes : 0);
}

// From token to token of a window tile in a stage: whole vectors of 16 bytes.
CUTE_HOST_DEVICE constexpr int window_row_elements(int head_dim) { return (head_dim + 7) / 8 * 8; }

struct Params : Problem {
  float scale_log2;                  // the kernels' exponentials are powers of two
  int group;                         // query heads of a KV head
  cutlass::FastDivmod query_tokens;  // query row of a KV head -> (query head of the group, query token)
  bool uniform;            // contiguous caches with one token order, row i attends to sequence i, equal lengths
  bool separate_orders;    // keys and values were not compressed together: each has its token order
  bool zero_masked;        // sequences may end within a tile whose further tokens are stored
  bool window_vectorized;  // the window's tokens may be read 16 bytes at a time
  bool window_staged;      // the window's tokens are copied to stages as tiles are; true without a window
  int schedule_bytes;      // of shared memory that the schedule takes
  schedule::Params schedule;
  pipeline::Stages stages;
  reduce::Output output;
};

}  // namespace cute_kernels::attention
