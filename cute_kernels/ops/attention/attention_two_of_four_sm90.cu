// In an object of their own: in one with the others the compiler spills registers of a kernel.
#include "cute_kernels/ops/attention/sm90/launch_impl.hpp"

namespace cute_kernels::attention::sm90 {
template Launcher<Params> launcher<CUTE_KERNELS_HEAD_DIM, mma::TwoOfFourCodecs>();
template Launcher<Params> launcher<CUTE_KERNELS_HEAD_DIM, mma::TwoOfFourBitmapCodecs>();
}  // namespace cute_kernels::attention::sm90
