// The products as the bindings call them: arch x head_dim x dtype -> launcher.
#pragma once

#include <string>

#include "cute_kernels/dispatch/heuristics.hpp"
#include "cute_kernels/dispatch/workspace.hpp"

namespace cute_kernels::dispatch {

struct Product {
  format::SparseView sparse;
  matmul::DenseOperand dense;
  int query_heads, query_tokens;
  void* out;
  format::DType out_dtype;  // sparse_qk
  float scale;              // sparse_qk
};

// On the current device. Nothing is synchronised. Throws std::runtime_error if the backend cannot serve. workspace:
// only sparse_av asks for it.
void run(Product const& product, Workspace const& workspace, std::string const& backend, cudaStream_t stream);

}  // namespace cute_kernels::dispatch
