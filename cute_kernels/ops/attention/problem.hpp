// One call of sparse_attention, as every backend gets it: pointers on the backend's device and sizes, checked.
//
//   out = softmax(scale * q [K; Kw]^T) [V; Vw], lse = log of the sum of exponentials
#pragma once

#include <cstdint>

#include "cute_kernels/format/storage.hpp"
#include "cute_kernels/schedule/packed_queries.hpp"

namespace cute_kernels::attention {

// Dense newest tokens, in the caches' dtype: (sequences, kv_heads, tokens, head_dim), strides in elements, 1 for the
// last.
struct Window {
  void const* keys;
  void const* values;
  int64_t key_strides[3], value_strides[3];
  int tokens;              // capacity; 0: no window
  int32_t const* lengths;  // (sequences): how many of them count, from the first; null: all
};

// What the host knows of the compressed tokens that count, where lengths are on the device. Kernels are chosen and laid out
// for it; results depend on it in their last bits alone.
struct ExpectedLengths {
  int longest;  // of the longest sequence; 0: not known
  int64_t sum;  // of all rows of q
};

struct Problem {
  format::SparseView keys, values;  // both contiguous or both in pages of one table
  void const* q;                    // (batch, q_heads, q_tokens, head_dim) in the caches' dtype
  int64_t q_strides[3];             // elements; 1 for the last
  int batch, q_heads, q_tokens;     // packed: q_tokens at most of a row
  schedule::PackedQueries packed;   // q, out and lse are then as of one row with all tokens, and q_strides[0] is 0
  int32_t const*
      sequences;           // (batch): row of caches, lengths and windows that a row of q attends to; null: the same row
  int32_t const* lengths;  // (sequences): compressed tokens that count, clamped to [0, tokens]; null: all
  Window window;           // follows the compressed tokens that count
  float scale;
  bool causal;     // query i sees all tokens but the q_tokens - 1 - i newest
  void* out;       // contiguous (batch, q_heads, q_tokens, head_dim) in the caches' dtype
  float* lse;      // contiguous (batch, q_heads, q_tokens), or null
  int num_splits;  // the most splits of a KV head's tokens; 0: any number
  ExpectedLengths expected;
};

}  // namespace cute_kernels::attention
