// Compression on the GPU, step by step: select what is kept, balance the tiles, pack them; and back.
// The same steps with the same results, bit for bit, as the CPU backend (cpu/). Nothing here synchronises or allocates.
#pragma once

#include <cuda_runtime_api.h>

#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::compress {

// A dense K or V: (batch, kv_heads, tokens, head_dim), channel stride 1, other strides in elements.
struct DenseView {
  void const* data;
  int64_t stride_batch, stride_head, stride_token;
  int batch, kv_heads;
  int64_t tokens;
  int head_dim;
  format::DType dtype;
};

// masks (batch * kv_heads * tokens, padded / 32): kept and nonzero, or null. counts (batch * kv_heads, padded):
// nonzeros of a channel, or null. pruned: contiguous copy with zeros for what is not kept, or null. keep = 0 keeps
// every nonzero.
void select(DenseView const& x, int keep, uint32_t* masks, int32_t* counts, void* pruned, cudaStream_t stream);

// What `balance` reads of one cache, and the longest stream of each of its tiles that it writes.
struct BalanceOperand {
  uint32_t const* masks;
  uint8_t const* channel_order;
  int32_t* longest;
};
// `second` has null masks, or is the V of a pair that shares one token order.
void balance(BalanceOperand const& first, BalanceOperand const& second, int heads, int64_t tokens, int padded_head_dim,
             uint8_t* token_order, cudaStream_t stream);

void pack(DenseView const& x, uint32_t const* masks, format::SparseView const& view, cudaStream_t stream);

void decompress(format::SparseView const& view, void* out, cudaStream_t stream);

}  // namespace cute_kernels::compress
