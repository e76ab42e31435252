#include "cute_kernels/ops/av/sm90.hpp"

namespace cute_kernels::av::sm90 {
template Launcher<Params> launcher<CUTE_KERNELS_HEAD_DIM, mma::HalfCodecs>();
template Launcher<Params> launcher<CUTE_KERNELS_HEAD_DIM, mma::NarrowCodecs>();
template Launcher<Params> launcher<CUTE_KERNELS_HEAD_DIM, mma::TwoOfFourCodecs>();
}  // namespace cute_kernels::av::sm90
