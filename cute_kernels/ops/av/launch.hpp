// The launchers of sparse_av that dispatch/ chooses from.
#pragma once

#include "cute_kernels/ops/av/params.hpp"
#include "cute_kernels/ops/launcher.hpp"

namespace cute_kernels::av {

namespace sm80 {
template <int kHeadDim, class Codecs>
Launcher<Params> launcher();
}

namespace sm90 {
template <int kHeadDim, class Codecs>
Launcher<Params> launcher();
}

}  // namespace cute_kernels::av
