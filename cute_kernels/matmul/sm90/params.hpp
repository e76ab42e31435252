// What the kernels of CC 9.0 are called with: the product's parameters, and p as TMA sees it.
#pragma once

#include <cuda.h>

#include "cute_kernels/matmul/params.hpp"
#include "cute_kernels/matmul/sm90/cluster.hpp"
#include "cute_kernels/matmul/sm90/first_tiles.hpp"
#include "cute_kernels/matmul/sm90/ring.hpp"

namespace cute_kernels::matmul::sm90 {

struct TmaParams : Params {
  RingShape ring;
  FirstTiles first_tiles;
  ClusterShape cluster;  // if work.by_segments

  // p as (tokens, rows of all KV heads, batch), a box being a tile's rows with the 16 bytes that follow each, which
  // bring rows to different banks. Only if `vectorized`; otherwise the consumers read p themselves.
  CUtensorMap dense_map;
  int box_rows;
};

}  // namespace cute_kernels::matmul::sm90
