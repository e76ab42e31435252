// Softmax attention on the CPU backend.
#pragma once

#include "cute_kernels/attention/problem.hpp"

namespace cute_kernels::cpu {

// The same bits for any number of threads. What a query does not see has no part in its result, be it NaN.
// Throws std::out_of_range for an entry of `sequences` that there is not, std::invalid_argument for tokens without a
// page; nothing is written then.
void sparse_attention(const attention::Problem& problem, int threads);

}  // namespace cute_kernels::cpu
