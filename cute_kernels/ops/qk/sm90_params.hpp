// What the kernels of CC 9.0 are called with; nothing comes with a tile of keys but its block and order.
#pragma once

#include "cute_kernels/ops/product/stage.hpp"
#include "cute_kernels/ops/qk/params.hpp"
#include "cute_kernels/pipeline/bulk/params.hpp"

namespace cute_kernels::qk::sm90 {

using RingParams = pipeline::RingParams<Params>;

struct NoDenseLoad {
  NoDenseLoad() = default;
  CUTE_DEVICE NoDenseLoad(RingParams const&, schedule::WorkTile const&, int) {}
  CUTE_DEVICE int bytes(RingParams const&) const { return 0; }
  template <class Barrier>
  CUTE_DEVICE void load(RingParams const&, product::Stage const&, Barrier&) const {}
};

}  // namespace cute_kernels::qk::sm90
