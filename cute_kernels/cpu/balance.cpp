// The order of tokens inside each tile, see format/token_order.hpp.
#include "cute_kernels/cpu/parallel.hpp"
#include "cute_kernels/cpu/tile_steps.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kClasses;
using format::kTileTokens;

int count_bits(uint32_t x) {
#if defined(__GNUC__)
  return __builtin_popcount(x);
#else
  int n = 0;
  for (; x; x &= x - 1) ++n;
  return n;
#endif
}

// The channels of each class of a head as masks in natural channel order.
struct ClassMasks {
  uint32_t word[kClasses][format::kMaxHeadDim / 32];

  ClassMasks(uint8_t const* channel_order, int head_dim) : word{} {
    for (int position = 0; position < head_dim; ++position) {
      int channel = channel_order[position];
      word[position % kClasses][channel / 32] |= 1u << (channel % 32);
    }
  }
};

template <int Classes>
void count_tokens(BalanceOperand const& operand, int64_t head, int64_t tile, int64_t tokens, int head_dim,
                  int first_class, format::TokenCounts<Classes>& counts) {
  int64_t const first = tile * kTileTokens;
  count_classes(operand.masks + (head * tokens + first) * (head_dim / 32), tokens - first,
                operand.channel_order + head * head_dim, head_dim, &counts.count[0][first_class], Classes);
}

template <int Classes>
void balance_tiles(BalanceOperand const& first, BalanceOperand const& second, int64_t heads, int64_t tokens,
                   int head_dim, uint8_t* token_order, int threads) {
  int64_t const tiles = (tokens + kTileTokens - 1) / kTileTokens;
  parallel(threads, heads * tiles, [&](TaskQueue& queue) {
    format::TokenCounts<Classes> counts;
    for (int64_t task; (task = queue.next()) >= 0;) {
      int64_t const head = task / tiles, tile = task % tiles;
      uint8_t* order = token_order + task * kTileTokens;
      count_tokens(first, head, tile, tokens, head_dim, 0, counts);
      if constexpr (Classes > kClasses) count_tokens(second, head, tile, tokens, head_dim, kClasses, counts);
      format::choose_token_order(counts, order);
      first.longest[task] = format::longest_stream(counts, order, 0);
      if constexpr (Classes > kClasses) second.longest[task] = format::longest_stream(counts, order, kClasses);
    }
  });
}

}  // namespace

void count_classes(uint32_t const* masks, int64_t tokens, uint8_t const* channel_order, int padded, uint8_t* counts,
                   int stride) {
  int const words = padded / 32;
  ClassMasks const classes(channel_order, padded);
  for (int t = 0; t < kTileTokens; ++t, masks += words, counts += stride)
    for (int c = 0; c < kClasses; ++c) {
      int n = 0;
      if (t < tokens)
        for (int w = 0; w < words; ++w) n += count_bits(masks[w] & classes.word[c][w]);
      counts[c] = static_cast<uint8_t>(n);
    }
}

void balance(BalanceOperand const& first, BalanceOperand const& second, int64_t heads, int64_t tokens,
             int padded_head_dim, uint8_t* token_order, int threads) {
  auto run = second.masks ? balance_tiles<2 * kClasses> : balance_tiles<kClasses>;
  run(first, second, heads, tokens, padded_head_dim, token_order, threads);
}

}  // namespace cute_kernels::cpu
