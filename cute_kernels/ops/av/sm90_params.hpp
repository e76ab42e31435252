// What the kernels of CC 9.0 are called with, and how producers load p.
#pragma once

#include <cuda.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_kernels/ops/av/params.hpp"
#include "cute_kernels/ops/product/stage.hpp"
#include "cute_kernels/pipeline/bulk/params.hpp"

namespace cute_kernels::av::sm90 {

struct RingParams : pipeline::RingParams<Params> {
  bool has_p_map;
  int box_rows;
  // p as (tokens, rows of all KV heads, batch), a box being a tile's rows with the 16 bytes that follow each, so
  // that rows start in different banks. Without it the workers read p themselves.
  CUtensorMap p_map;
};

// The columns of p of one tile, by a tensor copy.
struct PLoad {
  int first_token = 0, first_row = 0, batch = 0;

  PLoad() = default;
  CUTE_DEVICE PLoad(RingParams const& params, schedule::WorkTile const& work_tile, int tile)
      : first_token((tile - work_tile.tiles.begin) * format::kTileTokens),
        first_row(work_tile.kv_head * params.schedule.rows + work_tile.first_row),
        batch(work_tile.row) {}

  CUTE_DEVICE int bytes(RingParams const& params) const {
    return params.has_p_map ? params.box_rows * product::dense_row_bytes(params.dense.dtype) : 0;
  }
  template <class Barrier>
  CUTE_DEVICE void load(RingParams const& params, product::Stage const& stage, Barrier& full) const {
    if (!params.has_p_map) return;
    cute::SM90_TMA_LOAD_3D::copy(&params.p_map, reinterpret_cast<uint64_t*>(&full),
                                 static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), stage.dense_rows,
                                 first_token, first_row, batch);
  }
};

}  // namespace cute_kernels::av::sm90
