// Softmax attention on the CPU backend.
#pragma once

#include "cute_kernels/ops/attention/problem.hpp"

namespace cute_kernels::cpu {

// The same bits for any number of threads. What a query does not see has no part in its result, be it NaN.
// Throws std::out_of_range for an entry of `sequences` beyond the caches, std::invalid_argument for tokens without a
// page; nothing is written then.
void sparse_attention(attention::Problem const& problem, int threads);

}  // namespace cute_kernels::cpu
