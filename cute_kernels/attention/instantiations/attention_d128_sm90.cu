#include "cute_kernels/attention/sm90/launch_impl.hpp"

namespace cute_kernels::attention::sm90 {
template KernelLimits limits<128>(format::DType, int);
template void launch<128>(Params const&, Config const&, cudaStream_t);
}  // namespace cute_kernels::attention::sm90
