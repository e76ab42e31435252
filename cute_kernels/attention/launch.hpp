// The launchers that dispatch/ chooses from. Each (architecture, head_dim) is instantiated in a file of its own.
#pragma once

#include "cute_kernels/attention/params.hpp"
#include "cute_kernels/matmul/launch.hpp"

namespace cute_kernels::attention {

using matmul::Config;
using matmul::KernelLimits;

// Query rows a pass takes at most.
constexpr int max_rows(int padded_head_dim) { return padded_head_dim == 256 ? 8 : 16; }

// limits: of one kernel. launch: checks nothing, params and config come from dispatch/; throws std::runtime_error on a
// CUDA error. partial_bytes: of one partial.
namespace sm80 {
template <int kHeadDim>
KernelLimits limits(format::DType dtype, int n);
template <int kHeadDim>
void launch(Params const& params, Config const& config, cudaStream_t stream);
}  // namespace sm80

namespace sm90 {
template <int kHeadDim>
KernelLimits limits(format::DType dtype, int n);
template <int kHeadDim>
void launch(Params const& params, Config const& config, cudaStream_t stream);
}  // namespace sm90

// Bytes of one partial of `n` query rows.
constexpr int64_t partial_bytes(int n, int padded_head_dim) {
  return int64_t{n} * (padded_head_dim + 2) * static_cast<int>(sizeof(float));
}

}  // namespace cute_kernels::attention
