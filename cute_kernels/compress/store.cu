// Bulk compression into a pool: select, deal, balance, pack, in parts of the tokens.
#include <algorithm>

#include "cute_kernels/compress/destination.hpp"
#include "cute_kernels/compress/fit.hpp"
#include "cute_kernels/compress/pages.hpp"
#include "cute_kernels/compress/tile_kernel.hpp"
#include "cute_kernels/compress/trim.hpp"

namespace cute_kernels::compress {
namespace {

constexpr int kWarps = 4;  // of a CTA that balances

// The token orders of tiles, and the longest streams before they are trimmed. A warp a tile.
template <int Words>
__global__ void __launch_bounds__(32 * kWarps)
    balance_slots_kernel(BalanceOperand keys, BalanceOperand values, SlotLimits limits, unsigned tiles,
                         unsigned tiles_per_head, Destination to, uint8_t* token_order, int32_t* error) {
  __shared__ __align__(16) BalanceStorage<Words, 2> storage[kWarps];
  __shared__ FitStorage fits[kWarps];
  int lane = threadIdx.x % 32;
  unsigned tile = blockIdx.x * kWarps + threadIdx.x / 32, head = tile / tiles_per_head;
  if (tile >= tiles) return;
  int64_t slot = to.slot(head, tile % tiles_per_head);
  if (slot < 0) {
    if (slot == kNoSlot && lane == 0) *error = 1;
    return;
  }
  int64_t masks = int64_t{tile} * kTileTokens * Words, channels = to.order_index(head) * 32 * Words;
  TileMasks caches[] = {{keys.masks + masks, keys.channel_order + channels},
                        {values.masks + masks, values.channel_order + channels}};
  Fit fit{fits[threadIdx.x / 32], limits};
  int longest[2];
  balance_tile(storage[threadIdx.x / 32], caches, fit, token_order + slot * kTileTokens, longest, lane);
  if (lane == 0) keys.longest[tile] = longest[0], values.longest[tile] = longest[1];
}

// The results of balancing for one cache's tiles, and the longest streams of keys, which limit the rows of the values.
struct BalancedTiles {
  uint32_t const* masks;
  int32_t const *longest, *longest_keys;
  SlotLimits limits;
};

// Keys go first: the values' block starts where theirs ends.
template <Role kRole, int HeadDim, class Codec>
__global__ void __launch_bounds__(32 * warps_of(HeadDim))
    pack_slots_kernel(DenseView x, bool vectors, BalancedTiles tiles, uint16_t const* token_scale,
                      unsigned tiles_per_head, Destination to, SparseView view, int staged_rows, int64_t* dropped) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& s = *reinterpret_cast<PackStorage<HeadDim, Codec::kHasScales>*>(shared);
  unsigned tile = gridDim.x - 1 - blockIdx.x;  // the last tiles first: theirs is what caches still hold
  unsigned head = tile / tiles_per_head, of_head = tile % tiles_per_head;
  int64_t slot = to.slot(head, of_head);
  if (slot < 0) return;
  int most = kRole == Role::kKey ? tiles.limits.most_keys : tiles.limits.values(tiles.longest_keys[tile]);
  Trim<false> trim{tiles.longest[tile], most, nan_key(x.dtype), dropped};
  int value_rows = Codec::value_rows(min(trim.longest, trim.most));
  if (threadIdx.x == 0)
    const_cast<int32_t*>(view.row_offsets)[slot] = TileFormat::first_value_row<Codec>(HeadDim) + value_rows;
  TileSource source;
  source.rows = x.row(head, int64_t{of_head} * kTileTokens);
  source.stride_token = x.stride_token;
  source.tokens = kTileTokens;
  source.head_dim = x.head_dim;
  source.vectors = vectors;
  source.masks = tiles.masks + int64_t{tile} * kTileTokens * (HeadDim / 32);
  source.channel_order = view.channel_order + to.order_index(head) * HeadDim;
  source.token_order = view.token_order + slot * kTileTokens;
  if constexpr (Codec::kHasScales) {
    source.dtype = view.dtype;
    source.channel_scale = view.channel_scale + to.order_index(head) * HeadDim;
    source.token_scale = token_scale + int64_t{tile} * kTileTokens;
  }
  auto* block = const_cast<uint32_t*>(view.blocks) + view.first_row(slot) * kLanes;
  pack_tile<kRole, HeadDim, Codec>(s, source, block, value_rows, staged_rows, trim, WholeCta{});
}

// The arrays in the scratch, those of the keys before those of the values.
struct Scratch {
  uint32_t* masks[2];
  int32_t* counts[2];
  int32_t* longest[2];
  uint16_t *channel_scale[2], *token_scale[2];  // null without scales
  int64_t bytes = 0;

  Scratch(Pool const& pool, int64_t heads, int64_t tiles, void* base) {
    int padded = pool.keys.padded_head_dim;
    auto take_one = [&](auto*& p, int64_t size) {
      p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(static_cast<char*>(base) + bytes);
      bytes += (size + 15) / 16 * 16;
    };
    auto take = [&](auto*(&array)[2], int64_t size) { take_one(array[0], size), take_one(array[1], size); };
    take(masks, heads * tiles * mask_bytes(padded));
    take(counts, heads * padded * static_cast<int64_t>(sizeof(int32_t)));
    take(longest, heads * tiles * static_cast<int64_t>(sizeof(int32_t)));
    for (int i = 0; i < 2; ++i) {
      channel_scale[i] = token_scale[i] = nullptr;
      if (!(i ? pool.values : pool.keys).channel_scale) continue;
      take_one(channel_scale[i], heads * padded * static_cast<int64_t>(sizeof(uint16_t)));
      take_one(token_scale[i], heads * tiles * kTileTokens * static_cast<int64_t>(sizeof(uint16_t)));
    }
  }
};

DenseView part_of(DenseView x, int64_t first_token, int64_t tokens) {
  x.data = static_cast<uint16_t const*>(x.data) + first_token * x.stride_token;
  x.tokens = tokens;
  return x;
}

void balance_slots(Pool const& pool, Scratch const& scratch, unsigned tiles, unsigned tiles_per_head,
                   Destination const& to, cudaStream_t stream) {
  auto operand = [&](int i) {
    return BalanceOperand{scratch.masks[i], (i ? pool.values : pool.keys).channel_order, scratch.longest[i]};
  };
  auto launch = [&](auto kernel) {
    kernel<<<(tiles + kWarps - 1) / kWarps, 32 * kWarps, 0, stream>>>(
        operand(0), operand(1), SlotLimits(pool), tiles, tiles_per_head, to,
        const_cast<uint8_t*>(pool.keys.token_order), pool.error);
  };
  format::visit_head_dim(pool.keys.padded_head_dim,
                         [&](auto head_dim) { launch(balance_slots_kernel<head_dim() / 32>); });
  check_cuda(cudaGetLastError(), "launch of balance");
}

}  // namespace

int64_t store_scratch_bytes(Pool const& pool, int batch, int64_t part) {
  return Scratch(pool, int64_t{batch} * pool.keys.kv_heads, part, nullptr).bytes;
}

void store(Pool const& pool, DenseView const& k, DenseView const& v, PoolRows const& rows, NewOrder order, int64_t part,
           void* memory, cudaStream_t stream) {
  int64_t tiles = k.tokens / kTileTokens;
  int heads = k.batch * k.kv_heads;
  Scratch scratch(pool, heads, part, memory);
  DenseView const* x[] = {&k, &v};
  SparseView const* views[] = {&pool.keys, &pool.values};
  int keeps[] = {pool.key_keep, pool.value_keep};
  Destination to(pool, rows);
  bool in_one = part >= tiles, deals = order != NewOrder::kNever;
  TokenScaling scaling[2];
  for (int i = 0; i < 2; ++i) {
    if (!views[i]->channel_scale) continue;
    if (deals) channel_scales(part_of(*x[i], 0, kTileTokens), scratch.channel_scale[i], nullptr, nullptr, stream);
    load_scales(*views[i], to, order, heads, scratch.channel_scale[i], stream);
    scaling[i] = {views[i]->codec, scratch.channel_scale[i], scratch.token_scale[i], pool.refused + i};
  }
  for (int i = 0; i < 2 && deals; ++i) {
    select(*x[i], keeps[i], in_one ? scratch.masks[i] : nullptr, scratch.counts[i], nullptr,
           in_one ? scaling[i] : TokenScaling{}, stream);
    deal(scratch.counts[i], scratch.channel_scale[i], heads, *views[i], to, order, stream);
  }
  for (int64_t first = 0; first < tiles; first += part) {
    int64_t count = std::min(part, tiles - first);
    DenseView parts[] = {part_of(k, first * kTileTokens, count * kTileTokens),
                         part_of(v, first * kTileTokens, count * kTileTokens)};
    to.skipped_tiles = first;
    for (int i = 0; i < 2 && !(in_one && deals); ++i)
      select(parts[i], keeps[i], scratch.masks[i], nullptr, nullptr, scaling[i], stream);
    balance_slots(pool, scratch, static_cast<unsigned>(heads * count), static_cast<unsigned>(count), to, stream);
    for (int i = 0; i < 2; ++i)
      visit_packed_codec(views[i]->codec, [&](auto codec) {
        using Codec = decltype(codec);
        visit_shape(*views[i], [&](auto role, auto head_dim) {
          int staged = staged_rows(head_dim(), keeps[i]);
          BalancedTiles balanced{scratch.masks[i], scratch.longest[i], scratch.longest[0], SlotLimits(pool)};
          launch_tiles(pack_slots_kernel<role(), head_dim(), Codec>, heads * count, 32 * warps_of(head_dim()),
                       sizeof(PackStorage<head_dim(), Codec::kHasScales>) + staged * kRowBytes, stream,
                       "launch of pack", parts[i], parts[i].has_vectors(), balanced, scratch.token_scale[i],
                       static_cast<unsigned>(count), to, *views[i], staged, pool.dropped + 2 * i);
        });
      });
  }
}

}  // namespace cute_kernels::compress
