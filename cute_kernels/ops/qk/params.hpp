// What the kernels of sparse_qk are called with: logits = scale * q K^T.
#pragma once

#include "cute_kernels/ops/product/params.hpp"

namespace cute_kernels::qk {

struct Params : product::Params {
  void* out;  // (batch, query heads, query tokens, tokens), contiguous
  DType out_dtype;
  float scale;
  bool vector_stores;  // out may be written in fours
};

}  // namespace cute_kernels::qk
