// The products as the bindings call them.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "cute_kernels/dispatch/tuning.hpp"
#include "cute_kernels/dispatch/workspace.hpp"
#include "cute_kernels/ops/product/params.hpp"

namespace cute_kernels::dispatch {

// out = scale * q K^T (keys) or p V (values), contiguous.
struct Product {
  format::SparseView sparse;
  product::DenseOperand dense;
  int query_heads, query_tokens;
  void* out;
  DType out_dtype;  // of logits; else that of the values
  float scale;      // of logits
};

// On the current device. Nothing is synchronised. std::runtime_error if the backend cannot serve. workspace: only
// products with values ask for it.
void run(Product const& product, Workspace const& workspace, std::string const& backend, Tuning const& tuning,
         cudaStream_t stream);

}  // namespace cute_kernels::dispatch
