#include "cute_kernels/ops/attention/prefill/launch_impl.hpp"

namespace cute_kernels::attention::prefill {
template struct Launcher<CUTE_KERNELS_HEAD_DIM, mma::HalfCodecs>;
template struct Launcher<CUTE_KERNELS_HEAD_DIM, mma::NarrowCodecs>;
template struct Launcher<CUTE_KERNELS_HEAD_DIM, mma::TwoOfFourCodecs>;
template struct Launcher<CUTE_KERNELS_HEAD_DIM, mma::TwoOfFourBitmapCodecs>;
}  // namespace cute_kernels::attention::prefill
