// The launchers that dispatch/ chooses from. Each (architecture, role, head_dim) is instantiated in a file of its own.
#pragma once

#include <cuda_runtime_api.h>

#include "cute_kernels/matmul/params.hpp"

namespace cute_kernels::matmul {

// How a product is laid over one device. Chosen by dispatch/heuristics.hpp. A worker multiplies whole tiles: a warp of
// most kernels, a warpgroup of those with WGMMA.
struct Config {
  int n;        // query rows a pass, one of the architecture's
  int workers;  // a CTA, one CTA an SM
  int ctas;
  int producers;       // warps that fill a ring of stages, CC 9.0
  int segment_pieces;  // that every segment is cut into, none reaching into another; 0: without regard to segments
  int cluster;         // CTAs that share a segment then, else 1
  bool programmatic_launch;  // CC 9.0: the combine may be set up while the product kernel drains
};

// What the choice depends on, from the kernels' traits.
struct KernelLimits {
  int max_workers;
  int worker_warps;
  int min_stages, max_stages;  // of a worker; of a CTA if `one_ring`
  int min_block_bytes;         // of a stage: the room of a tile's block may also take its results
  int fixed_shared_bytes;
  bool one_ring;        // of stages for all workers
  int stages_ahead;     // of those, beyond one a worker, at most
  bool joins_segments;  // clusters can add up what workers have of a segment
};

// limits: of one kernel. launch: checks nothing, params and config come from dispatch/; throws std::runtime_error on a
// CUDA error.
namespace sm80 {
inline constexpr int kMinStages = 2, kMaxStages = 3;  // of a warp
template <format::Role kRole, int kHeadDim>
KernelLimits limits(format::DType dtype, int n);
template <format::Role kRole, int kHeadDim>
void launch(Params const& params, Config const& config, cudaStream_t stream);
}  // namespace sm80

namespace sm90 {
template <format::Role kRole, int kHeadDim>
KernelLimits limits(format::DType dtype, int n);
template <format::Role kRole, int kHeadDim>
void launch(Params const& params, Config const& config, cudaStream_t stream);
}  // namespace sm90

}  // namespace cute_kernels::matmul
