// Attention states of disjoint sets of tokens, merged: outputs weighted by their log-sum-exps.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cute_kernels/common/dtype.hpp"

namespace cute_kernels::reduce {

// outs (states, rows, head_dim), lses (states, rows): each state contiguous, `out_stride` and `lse_stride` elements from
// the next; out (rows, head_dim), lse (rows): contiguous. outs and out are aligned to 16 bytes in every state. lses are
// natural logarithms; an output whose lse is -infinity may be anything. head_dim is a multiple of 8, rows > 0, states > 0.
struct States {
  void const* outs;
  float const* lses;
  int64_t out_stride, lse_stride;
  void* out;
  float* lse;  // or null
  int states;
  int64_t rows;
  int head_dim;
  DType dtype;      // of outs
  DType out_dtype;  // of out: the same, or any if outs are fp32
};

void merge_states(States const& states, cudaStream_t stream);

}  // namespace cute_kernels::reduce
