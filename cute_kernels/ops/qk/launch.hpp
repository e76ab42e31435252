// The launchers of sparse_qk that dispatch/ chooses from.
#pragma once

#include "cute_kernels/ops/launcher.hpp"
#include "cute_kernels/ops/qk/params.hpp"

namespace cute_kernels::qk {

namespace sm80 {
template <int kHeadDim, class Codecs>
Launcher<Params> launcher();
}

namespace sm90 {
template <int kHeadDim, class Codecs>
Launcher<Params> launcher();
}

}  // namespace cute_kernels::qk
