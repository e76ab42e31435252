// Launches the second kernel of sparse_av.
#pragma once

#include "cute_kernels/common/error.hpp"
#include "cute_kernels/matmul/combine.hpp"
#include "cute_kernels/matmul/launch.hpp"

namespace cute_kernels::matmul {

// `workers_a_share`: whose shares the product kernel has added up already.
template <class Traits>
void launch_combine(Params const& params, Config const& config, int workers_a_share, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(params.work.tiles / params.work.tiles_per_segment.divisor, kAtoms<Traits>);
  launch.blockDim = dim3(32 * kCombineWarps);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = config.programmatic_launch ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&launch, combine_partials<Traits>, params, workers_a_share),
             "launch of combine_partials");
}

}  // namespace cute_kernels::matmul
