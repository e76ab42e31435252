// The CPU backend: what the bindings call. The same steps as the GPU backends on the same format; compression agrees
// with theirs bit for bit. Pointers and sizes were checked by the caller; storage has passed SparseKV.validate().
#pragma once

#include <cstdint>

#include "cute_kernels/compress/pool.hpp"
#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::cpu {

using format::DType;
using format::Role;
using format::SparseView;

// A dense K or V: (batch, kv_heads, tokens, head_dim), channel stride 1, other strides in elements.
struct DenseView {
  const uint16_t* data;
  int64_t stride_batch, stride_head, stride_token;
  int batch, kv_heads;
  int64_t tokens;
  int head_dim;
  DType dtype;

  const uint16_t* row(int64_t head, int64_t token) const {  // head: batch index * kv_heads + KV head
    return data + head / kv_heads * stride_batch + head % kv_heads * stride_head + token * stride_token;
  }
};

// The dense operand of a product, q or p: (batch, heads, tokens, last), last stride 1, other strides in elements.
struct DenseOperand {
  const void* data;
  int64_t stride_batch, stride_head, stride_token;
  int heads;
  int64_t tokens;
  DType dtype;
};

// masks (batch * kv_heads * tokens, padded / 32): kept and nonzero, or null. counts (batch * kv_heads, padded):
// nonzeros of a channel, or null. pruned: contiguous copy with zeros for what is not kept, or null. keep = 0 keeps
// every nonzero.
void select(const DenseView& x, int keep, uint32_t* masks, int32_t* counts, uint16_t* pruned, int threads);

// What `balance` reads of one cache, and the longest stream of each of its tiles that it writes.
struct BalanceOperand {
  const uint32_t* masks;
  const uint8_t* channel_order;
  int32_t* longest;
};
// `second` has null masks, or is the V of a pair that shares one token order.
void balance(const BalanceOperand& first, const BalanceOperand& second, int64_t heads, int64_t tokens,
             int padded_head_dim, uint8_t* token_order, int threads);

// Writes every word of every block of `view`.
void pack(const DenseView& x, const uint32_t* masks, const SparseView& view, int threads);

// out: contiguous (batch, kv_heads, tokens, head_dim).
void decompress(const SparseView& view, uint16_t* out, int threads);

// Selects, orders and packs k and v, whole tiles of tokens, straight into the pool's slots.
void store(const compress::Pool& pool, const DenseView& k, const DenseView& v, const compress::PoolRows& rows,
           compress::NewOrder order, int threads);

// keys, values: contiguous (kv_heads, tokens of the run, head_dim); zeros where there is no page.
void load(const compress::Pool& pool, const compress::TileRun& run, uint16_t* keys, uint16_t* values, int threads);

// out: contiguous (batch, q.heads, q.tokens, tokens) of out_dtype.
void sparse_qk(const SparseView& view, const DenseOperand& q, float scale, void* out, DType out_dtype, int threads);

// out: contiguous (batch, p.heads, p.tokens, head_dim) of the view's dtype; the same bits for any number of threads.
void sparse_av(const SparseView& view, const DenseOperand& p, uint16_t* out, int threads);

}  // namespace cute_kernels::cpu
