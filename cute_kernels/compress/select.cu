// Which elements are kept: per token the `keep` largest magnitudes, ties to the lower channel. No sort: the threshold
// is found by bisection on the 15 bits of the magnitude, one warp a token, then ties are ranked by prefix popcounts.
#include "cute_kernels/common/error.hpp"
#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/compress/compress.hpp"

namespace cute_kernels::compress {
namespace {

constexpr int kWarps = 4;             // a CTA; each takes a run of tokens, so that channel counts stay in registers
constexpr int kTokensPerWarp = 16;

// Lane l holds channels l, l + 32, ...: a ballot is a mask word in natural channel order.
template <int Words>
__device__ void keep_largest(uint32_t const (&key)[Words], int keep, uint32_t (&kept)[Words]) {
  uint32_t threshold = 0;  // in the end the keep-th largest key
  for (uint32_t bit = 1u << 14; bit; bit >>= 1) {
    int count = 0;
#pragma unroll
    for (int w = 0; w < Words; ++w) count += __popc(__ballot_sync(~0u, key[w] >= (threshold | bit)));
    if (count >= keep) threshold |= bit;
  }
  int free = keep;
#pragma unroll
  for (int w = 0; w < Words; ++w) {
    kept[w] = __ballot_sync(~0u, key[w] > threshold);
    free -= __popc(kept[w]);
  }
#pragma unroll
  for (int w = 0; w < Words; ++w) {
    uint32_t equal = __ballot_sync(~0u, key[w] == threshold);
    bool take = (equal >> threadIdx.x % 32 & 1) && __popc(equal & ((1u << threadIdx.x % 32) - 1)) < free;
    kept[w] |= __ballot_sync(~0u, take);
    free -= __popc(equal);
  }
}

template <int Words>
__global__ void __launch_bounds__(32 * kWarps) select_kernel(DenseView x, int keep, uint32_t* masks, int32_t* counts,
                                                             uint16_t* pruned) {
  int lane = threadIdx.x % 32, ctas_per_head = gridDim.x / (x.batch * x.kv_heads), head = blockIdx.x / ctas_per_head;
  int64_t first = (int64_t{blockIdx.x % ctas_per_head} * kWarps + threadIdx.x / 32) * kTokensPerWarp;
  int64_t last = first + kTokensPerWarp < x.tokens ? first + kTokensPerWarp : x.tokens;
  auto const* from =
      static_cast<uint16_t const*>(x.data) + head / x.kv_heads * x.stride_batch + head % x.kv_heads * x.stride_head;
  uint32_t nan = nan_key(x.dtype);
  int count[Words] = {};
  for (int64_t token = first; token < last; ++token) {
    int64_t row = int64_t{head} * x.tokens + token;
    uint16_t bits[Words];
    uint32_t key[Words], kept[Words];
#pragma unroll
    for (int w = 0; w < Words; ++w) {
      int channel = 32 * w + lane;
      bits[w] = channel < x.head_dim ? from[token * x.stride_token + channel] : 0;
      key[w] = magnitude_key(bits[w], nan);
    }
    if (keep > 0) {
      keep_largest<Words>(key, keep, kept);
    } else {
#pragma unroll
      for (int w = 0; w < Words; ++w) kept[w] = ~0u;
    }
#pragma unroll
    for (int w = 0; w < Words; ++w) {
      uint32_t mask = kept[w] & __ballot_sync(~0u, key[w] != 0);
      bool mine = mask >> lane & 1;
      count[w] += mine;
      if (masks && lane == 0) masks[row * Words + w] = mask;
      if (pruned && 32 * w + lane < x.head_dim) pruned[row * x.head_dim + 32 * w + lane] = mine ? bits[w] : 0;
    }
  }
  if (counts && first < last) {
#pragma unroll
    for (int w = 0; w < Words; ++w)
      if (count[w]) atomicAdd(counts + (int64_t{head} * Words + w) * 32 + lane, count[w]);
  }
}

}  // namespace

void select(DenseView const& x, int keep, uint32_t* masks, int32_t* counts, void* pruned, cudaStream_t stream) {
  int padded = format::padded_head_dim(x.head_dim), heads = x.batch * x.kv_heads;
  if (counts) check_cuda(cudaMemsetAsync(counts, 0, sizeof(int32_t) * heads * padded, stream), "memset of counts");
  constexpr int kTokens = kWarps * kTokensPerWarp;
  int64_t grid = (x.tokens + kTokens - 1) / kTokens * heads;
  if (grid > INT32_MAX) throw std::invalid_argument("x: more than 2^31 runs of 64 tokens");
  auto launch = [&](auto kernel) {
    kernel<<<static_cast<unsigned>(grid), 32 * kWarps, 0, stream>>>(x, keep, masks, counts,
                                                                    static_cast<uint16_t*>(pruned));
  };
  if (padded == 64) launch(select_kernel<2>);
  else if (padded == 128) launch(select_kernel<4>);
  else launch(select_kernel<8>);
  check_cuda(cudaGetLastError(), "launch of select");
}

}  // namespace cute_kernels::compress
