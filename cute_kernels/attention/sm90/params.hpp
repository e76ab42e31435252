// What the kernels of CC 9.0 are called with.
#pragma once

#include "cute_kernels/attention/params.hpp"
#include "cute_kernels/matmul/sm90/cluster.hpp"
#include "cute_kernels/matmul/sm90/first_tiles.hpp"
#include "cute_kernels/matmul/sm90/ring.hpp"

namespace cute_kernels::attention::sm90 {

struct RingParams : Params {
  matmul::sm90::RingShape ring;
  matmul::sm90::FirstTiles first_tiles;  // of keys and of values alike
  matmul::sm90::ClusterShape cluster;    // if by_segments
};

}  // namespace cute_kernels::attention::sm90
