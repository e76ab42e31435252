// The launchers that dispatch/ chooses from. Each (architecture, role, head_dim) is instantiated in a file of its own.
#pragma once

#include <cuda_runtime_api.h>

#include "cute_kernels/matmul/params.hpp"

namespace cute_kernels::matmul {

// How a product is laid over one device. Chosen by dispatch/heuristics.hpp.
struct Config {
  int n;      // query rows a pass: 8 or 16
  int warps;  // a CTA, one CTA an SM
  int ctas;
  bool programmatic_launch;  // CC 9.0: the combine may be set up while the product kernel drains
};

// What the choice depends on, from the kernels' traits.
struct KernelLimits {
  int max_warps;
  int min_stages, max_stages;  // a warp
  int min_block_bytes;         // of a stage: the room of a tile's block also takes its results
  int static_shared_bytes;
};

struct Sm80 {};

// The pipeline that feeds an architecture's kernels: pipeline_sm80.hpp.
template <class Arch, class Traits>
struct PipelineOf;

template <class Arch, format::Role kRole, int kHeadDim>
KernelLimits limits(format::DType dtype, int n);

// Checks nothing: params and config come from dispatch/. Throws std::runtime_error on a CUDA error.
template <class Arch, format::Role kRole, int kHeadDim>
void launch(Params const& params, Config const& config, cudaStream_t stream);

}  // namespace cute_kernels::matmul
