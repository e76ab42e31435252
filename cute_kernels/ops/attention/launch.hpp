// The launchers of attention that dispatch/ chooses from.
#pragma once

#include "cute_kernels/ops/attention/params.hpp"
#include "cute_kernels/ops/launcher.hpp"

namespace cute_kernels::attention {

// Query rows a pass of these kernels takes at most, where registers are all that limits.
constexpr int max_rows(int padded_head_dim) { return padded_head_dim == 256 ? 8 : 16; }

// The same where a worker of CC 9.0 is a warpgroup; 0: there are no such kernels.
constexpr int max_warpgroup_rows(int padded_head_dim) { return padded_head_dim == 256 ? 0 : 32; }

// Bytes of one partial of `n` query rows.
constexpr int64_t partial_bytes(int n, int padded_head_dim) {
  return int64_t{n} * (padded_head_dim + 2) * static_cast<int>(sizeof(float));
}

namespace sm80 {
template <int kHeadDim, class Codecs>
Launcher<Params> launcher();
}

namespace sm90 {
template <int kHeadDim, class Codecs>
Launcher<Params> launcher();
}

}  // namespace cute_kernels::attention
