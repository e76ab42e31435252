// What sparse_qk and sparse_av are called with alike: a compressed operand and a dense one.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "cute_kernels/format/storage.hpp"
#include "cute_kernels/pipeline/config.hpp"
#include "cute_kernels/schedule/params.hpp"

namespace cute_kernels::product {

// q of sparse_qk or p of sparse_av, (batch, heads, tokens, contiguous last mode), strides in elements.
struct DenseOperand {
  void const* data;
  int64_t stride_batch, stride_head, stride_token;
  DType dtype;
};

struct Params {
  format::SparseView sparse;
  DenseOperand dense;
  int group;                         // query heads of a KV head
  cutlass::FastDivmod query_tokens;  // query row of a KV head -> (query head of the group, query token)
  schedule::Params schedule;
  pipeline::Stages stages;

  // Where the rows of a KV head start in the dense operand, and where one of them lies from there.
  CUTE_HOST_DEVICE int64_t head_offset(schedule::WorkTile const& work_tile) const {
    return work_tile.row * dense.stride_batch + int64_t{work_tile.kv_head} * group * dense.stride_head;
  }
  CUTE_HOST_DEVICE int64_t row_offset(int row) const {
    int query_head, query_token;
    query_tokens(query_head, query_token, row);
    return query_head * dense.stride_head + query_token * dense.stride_token;
  }

  // (batch row, KV head) of a work tile, counted through the storage.
  CUTE_HOST_DEVICE int64_t head(schedule::WorkTile const& work_tile) const {
    return int64_t{work_tile.row} * sparse.kv_heads + work_tile.kv_head;
  }
  // Where a tile of the schedule is in the storage.
  CUTE_HOST_DEVICE int64_t storage_tile(int tile) const {
    int work_tile, in_work_tile;
    schedule.tiles_per_work_tile(work_tile, in_work_tile, tile);
    return int64_t{schedule.row_blocks.div(work_tile)} * schedule.tiles_per_work_tile.divisor + in_work_tile;
  }
  CUTE_HOST_DEVICE uint8_t const* channel_order(schedule::WorkTile const& work_tile) const {
    return sparse.channel_order_of(work_tile.row, work_tile.kv_head);
  }
  CUTE_HOST_DEVICE uint16_t const* channel_scale(schedule::WorkTile const& work_tile) const {
    return sparse.channel_scale_of(work_tile.row, work_tile.kv_head);
  }
};

}  // namespace cute_kernels::product
