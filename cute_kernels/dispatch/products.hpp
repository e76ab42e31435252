// The products as the bindings call them: arch x head_dim x dtype -> launcher.
#pragma once

#include <string>

#include "cute_kernels/dispatch/heuristics.hpp"

namespace cute_kernels::dispatch {

struct Product {
  format::SparseView sparse;
  matmul::DenseOperand dense;
  int query_heads, query_tokens;
  void* out;
  format::DType out_dtype;  // sparse_qk
  float scale;              // sparse_qk
  void* workspace;          // sparse_av: workspace_bytes() bytes
};

// Of sparse_av on the current device; sparse_qk needs none.
int64_t workspace_bytes(format::SparseView const& view, int query_heads, int query_tokens, std::string const& backend);

// On the current device. Nothing is synchronised or allocated. Throws std::runtime_error if the backend cannot serve.
void run(Product const& product, std::string const& backend, cudaStream_t stream);

}  // namespace cute_kernels::dispatch
