#include "cute_kernels/ops/attention/sm80/launch_impl.hpp"

namespace cute_kernels::attention::sm80 {
template Launcher<Params> launcher<CUTE_KERNELS_HEAD_DIM, mma::CUTE_KERNELS_CODECS>();
}
