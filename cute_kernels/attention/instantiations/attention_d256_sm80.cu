#include "cute_kernels/attention/sm80/launch_impl.hpp"

namespace cute_kernels::attention::sm80 {
template KernelLimits limits<256>(format::DType, int);
template void launch<256>(Params const&, Config const&, cudaStream_t);
}  // namespace cute_kernels::attention::sm80
