#include "cute_kernels/matmul/pipeline_sm80.hpp"

#include "cute_kernels/matmul/launch_impl.hpp"

namespace cute_kernels::matmul {
template KernelLimits limits<Sm80, Role::kValue, 128>(format::DType, int);
template void launch<Sm80, Role::kValue, 128>(Params const&, Config const&, cudaStream_t);
}  // namespace cute_kernels::matmul
