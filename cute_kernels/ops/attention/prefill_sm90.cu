#include "cute_kernels/ops/attention/prefill/launch_impl.hpp"

namespace cute_kernels::attention::prefill {
template struct Launcher<CUTE_KERNELS_HEAD_DIM, mma::CUTE_KERNELS_CODECS>;
}
