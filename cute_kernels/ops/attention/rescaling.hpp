// When the maximum of an online softmax is raised. Exponents of P are relative to a row's row_max, which need not be its
// largest logit: as in FlashAttention-4, it is raised, and what has been added up rescaled, only where an exponent is
// above kRescaleThreshold, so that nearly all tiles pass without.
#pragma once

namespace cute_kernels::attention {

inline constexpr float kRescaleThreshold = 8;

}  // namespace cute_kernels::attention
