// What the kernels of CC 9.0 are called with.
#pragma once

#include "cute_kernels/attention/params.hpp"
#include "cute_kernels/matmul/sm90/ring.hpp"

namespace cute_kernels::attention::sm90 {

struct RingParams : Params {
  matmul::sm90::RingShape ring;
  int cluster;  // CTAs that share a segment if by_segments
};

}  // namespace cute_kernels::attention::sm90
