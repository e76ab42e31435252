#include "cute_kernels/matmul/sm90/launch_impl.hpp"

namespace cute_kernels::matmul::sm90 {
template KernelLimits limits<Role::kValue, 128>(format::DType, int);
template void launch<Role::kValue, 128>(Params const&, Config const&, cudaStream_t);
}  // namespace cute_kernels::matmul::sm90
