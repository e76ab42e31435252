// What the kernels of sparse_av are called with: out = p V.
#pragma once

#include "cute_kernels/ops/product/params.hpp"
#include "cute_kernels/reduce/partial.hpp"

namespace cute_kernels::av {

struct Params : product::Params {
  reduce::Output output;
  bool vector_loads;  // every row of p starts on 16 bytes
};

}  // namespace cute_kernels::av
