// The token order of every tile, a warp a tile.
#include "cute_kernels/common/error.hpp"
#include "cute_kernels/compress/balance_tile.hpp"

namespace cute_kernels::compress {
namespace {

constexpr int kWarps = 4;  // a CTA

template <int Words, int Caches>
__global__ void __launch_bounds__(32 * kWarps)
    balance_kernel(BalanceOperand first, BalanceOperand second, int64_t tiles, unsigned tiles_per_head,
                   uint8_t* token_order) {
  __shared__ __align__(16) BalanceStorage<Words, Caches> storage[kWarps];
  auto& s = storage[threadIdx.x / 32];
  int lane = threadIdx.x % 32;
  int64_t tile = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (tile >= tiles) return;
  int64_t channels = int64_t{static_cast<unsigned>(tile) / tiles_per_head} * 32 * Words;
  int64_t masks = tile * kTileTokens * Words;

  TileMasks caches[Caches];
  int longest[Caches];
#pragma unroll
  for (int o = 0; o < Caches; ++o) {
    BalanceOperand const& operand = o ? second : first;
    caches[o] = {operand.masks + masks, operand.channel_order + channels};
  }
  balance_tile(s, caches, NoFit{}, token_order + tile * kTileTokens, longest, lane);
#pragma unroll
  for (int o = 0; o < Caches; ++o)
    if (lane == 0) (o ? second : first).longest[tile] = longest[o];
}

}  // namespace

void balance(BalanceOperand const& first, BalanceOperand const& second, int heads, int64_t tokens, int padded_head_dim,
             uint8_t* token_order, cudaStream_t stream) {
  int64_t tiles_per_head = (tokens + kTileTokens - 1) / kTileTokens, tiles = heads * tiles_per_head;
  auto launch = [&](auto kernel) {
    kernel<<<static_cast<unsigned>((tiles + kWarps - 1) / kWarps), 32 * kWarps, 0, stream>>>(
        first, second, tiles, static_cast<unsigned>(tiles_per_head), token_order);
  };
  format::visit_head_dim(padded_head_dim, [&](auto head_dim) {
    constexpr int kWords = head_dim() / 32;
    if (second.masks)
      launch(balance_kernel<kWords, 2>);
    else
      launch(balance_kernel<kWords, 1>);
  });
  check_cuda(cudaGetLastError(), "launch of balance");
}

}  // namespace cute_kernels::compress
