// How dispatch/ calls an operation on one architecture, for one head_dim.
#pragma once

#include "cute_kernels/format/storage.hpp"
#include "cute_kernels/pipeline/config.hpp"

namespace cute_kernels {

// Each is instantiated in <op>_<backend>.cu. std::runtime_error for a codec that is not instantiated.
template <class Params>
struct Launcher {
  int max_rows;  // query rows a pass takes at most: 8 or a power of two times that
  // Of the kernel for `n` query rows a pass.
  pipeline::KernelLimits (*limits)(format::CodecId codec, int n);
  // Checks nothing: params and config come from dispatch/. std::runtime_error on a CUDA error.
  void (*launch)(Params const& params, pipeline::Config const& config, cudaStream_t stream);
};

}  // namespace cute_kernels
