#include "cute_kernels/matmul/sm80/launch_impl.hpp"

namespace cute_kernels::matmul::sm80 {
template KernelLimits limits<Role::kKey, 256>(format::DType, int);
template void launch<Role::kKey, 256>(Params const&, Config const&, cudaStream_t);
}  // namespace cute_kernels::matmul::sm80
