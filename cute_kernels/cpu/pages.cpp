// Compression into a pool of pages and back, tile by tile.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "cute_kernels/cpu/kernels.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/cpu/parallel.hpp"
#include "cute_kernels/cpu/tile_steps.hpp"

namespace cute_kernels::cpu {
namespace {

using compress::NewOrder;
using compress::Pool;
using compress::PoolRows;
using format::kClasses;
using format::kLanes;
using format::kTileTokens;

uint8_t* channels_of(SparseView const& view, int sequence, int kv_head) {
  return const_cast<uint8_t*>(view.channel_order_of(sequence, kv_head));
}

// Channels, densest first, ties by lower channel, go to the classes back and forth.
void deal(int32_t const* counts, int padded, uint8_t* order) {
  std::vector<uint8_t> densest(padded);
  std::iota(densest.begin(), densest.end(), uint8_t{0});
  std::stable_sort(densest.begin(), densest.end(), [&](int a, int b) { return counts[a] > counts[b]; });
  for (int rank = 0; rank < padded; ++rank) {
    int offset = rank % kClasses;
    bool forth = rank / kClasses % 2 == 0;
    order[rank - offset + (forth ? offset : kClasses - 1 - offset)] = densest[rank];
  }
}

// And the scales of channels, by the first tile's tokens.
void deal_rows(SparseView const& view, int keep, DenseView const& x, PoolRows const& rows, NewOrder order,
               int threads) {
  if (order == NewOrder::kNever) return;
  int const padded = view.padded_head_dim;
  std::vector<int32_t> counts(static_cast<size_t>(x.batch) * x.kv_heads * padded);
  select(x, keep, nullptr, counts.data(), nullptr, threads);
  std::vector<uint16_t> scales(view.channel_scale ? counts.size() : 0);  // by channel
  DenseView first_tile = x;
  first_tile.tokens = kTileTokens;
  if (view.channel_scale) channel_scales(first_tile, scales.data(), threads);
  for (int i = 0; i < x.batch; ++i)
    for (int h = 0; h < x.kv_heads; ++h) {
      int const sequence = rows.sequences[i];
      if (sequence < 0 || sequence >= view.batch || !compress::deals(order, rows.first_tiles[i])) continue;
      int64_t const first = (int64_t{i} * x.kv_heads + h) * padded;
      uint8_t* const channels = channels_of(view, sequence, h);
      deal(counts.data() + first, padded, channels);
      for (int p = 0; p < padded && view.channel_scale; ++p)
        const_cast<uint16_t*>(view.channel_scale_of(sequence, h))[p] = scales[first + channels[p]];
    }
}

// What compression of a tile takes from one cache.
struct Operand {
  SparseView const& view;
  DenseView const& x;
  int keep;
  compress::TileRows tile_rows;
  std::vector<uint32_t> masks;
  std::vector<float> per_channel;      // reciprocals of scales, by channel
  uint16_t token_scales[kTileTokens];  // by token

  Operand(SparseView const& view, DenseView const& x, int keep)
      : view(view),
        x(x),
        keep(keep),
        tile_rows(view),
        masks(static_cast<size_t>(kTileTokens) * view.padded_head_dim / 32),
        per_channel(view.padded_head_dim) {}

  void select_tile(int64_t head, int64_t first_token, uint8_t const* channels, uint8_t* counts) {
    int const padded = view.padded_head_dim;
    for (int t = 0; t < kTileTokens; ++t)
      kernels().select_row(x.row(head, first_token + t), x.head_dim, padded, x.dtype == DType::kBFloat16, keep,
                           masks.data() + t * (padded / 32), nullptr, nullptr);
    count_classes(masks.data(), kTileTokens, channels, padded, counts, 2 * kClasses);
  }

  // Chooses the scales of the tile's tokens. Returns how many of what is kept the codec cannot store.
  int scale_tile(int64_t head, int64_t first_token, uint8_t const* channels, uint16_t const* channel_scales) {
    if (!channel_scales) return 0;
    for (int p = 0; p < view.padded_head_dim; ++p)
      per_channel[channels[p]] = 1 / format::scale_value(channel_scales[p]);
    return tile_token_scales(x, head, first_token, masks.data(), view.codec, per_channel.data(), token_scales);
  }

  // longest: stream of the tile; most: values that a stream may keep. Returns the nonzeros that were dropped.
  int pack_tile(int64_t head, int64_t first_token, uint8_t const* channels, uint8_t const* token_order,
                uint16_t const* channel_scales, int longest, int most, int64_t index, uint16_t* dense) const {
    int const padded = view.padded_head_dim;
    gather_tile(x, head, first_token, masks.data(), token_order, channels, padded, dense);
    int const dropped = longest > most ? trim_streams(view, most, dense) : 0;
    int const rows = tile_rows.of(std::min(longest, most));
    uint16_t scales[kTileTokens];
    for (int p = 0; p < kTileTokens && channel_scales; ++p)
      scales[format::scale_index(p)] = token_scales[token_order[p]];
    write_block(view, dense, {scales, channel_scales}, rows,
                const_cast<uint32_t*>(view.blocks) + view.first_row(index) * kLanes);
    const_cast<int32_t*>(view.row_offsets)[index] = rows;
    return dropped;
  }
};

}  // namespace

void store(Pool const& pool, DenseView const& k, DenseView const& v, PoolRows const& rows, NewOrder order,
           int threads) {
  int const padded = pool.keys.padded_head_dim;
  deal_rows(pool.keys, pool.key_keep, k, rows, order, threads);
  deal_rows(pool.values, pool.value_keep, v, rows, order, threads);

  int64_t const tiles = k.tokens / kTileTokens;
  compress::SlotLimits const limits(pool);
  std::atomic<int64_t> dropped[4] = {}, refused[2] = {};
  std::atomic<bool> missing{false};
  parallel(threads, int64_t{k.batch} * k.kv_heads * tiles, [&](TaskQueue& queue) {
    Operand operands[] = {{pool.keys, k, pool.key_keep}, {pool.values, v, pool.value_keep}};
    std::vector<uint16_t> dense(static_cast<size_t>(kTileTokens) * padded);
    format::TokenCounts<2 * kClasses> counts;
    for (int64_t task; (task = queue.next()) >= 0;) {
      int64_t const head = task / tiles, first_token = task % tiles * kTileTokens;
      int const row = static_cast<int>(head / k.kv_heads), kv_head = static_cast<int>(head % k.kv_heads);
      int const sequence = rows.sequences[row];
      int64_t const tile = rows.first_tiles[row] + task % tiles;
      if (sequence < 0) continue;
      int64_t const index = compress::find_slot(pool.keys, sequence, kv_head, tile);
      if (index == compress::kNoSlot) {
        missing = true;
        continue;
      }
      uint8_t* token_order = const_cast<uint8_t*>(pool.keys.token_order) + index * kTileTokens;
      for (int o = 0; o < 2; ++o)
        operands[o].select_tile(head, first_token, channels_of(operands[o].view, sequence, kv_head),
                                &counts.count[0][o * kClasses]);
      format::choose_token_order(counts, token_order);
      int const longest_key = format::longest_stream(counts, token_order);
      int const bound[] = {limits.keys(longest_key), limits.values(longest_key)};
      format::fit_token_order(counts, bound, token_order);
      int const longest[] = {format::longest_stream(counts, token_order),
                             format::longest_stream(counts, token_order, kClasses)};
      int const most[] = {limits.most_keys, limits.values(longest[0])};
      for (int o = 0; o < 2; ++o) {  // keys first: the values' block follows theirs
        uint8_t const* channels = channels_of(operands[o].view, sequence, kv_head);
        uint16_t const* scales = operands[o].view.channel_scale_of(sequence, kv_head);
        if (int const n = operands[o].scale_tile(head, first_token, channels, scales)) refused[o] += n;
        int const lost = operands[o].pack_tile(head, first_token, channels, token_order, scales, longest[o], most[o],
                                               index, dense.data());
        if (lost) dropped[2 * o] += 1, dropped[2 * o + 1] += lost;
      }
    }
  });
  for (int i = 0; i < 4; ++i) pool.dropped[i] += dropped[i];
  for (int i = 0; i < 2; ++i) pool.refused[i] += refused[i];
  if (missing) *pool.error = 1;
}

void load(Pool const& pool, compress::TileRun const& run, uint16_t* keys, uint16_t* values, int threads) {
  int const padded = pool.keys.padded_head_dim, head_dim = pool.keys.head_dim;
  std::atomic<bool> missing{false};
  parallel(threads, int64_t{pool.keys.kv_heads} * run.tiles, [&](TaskQueue& queue) {
    std::vector<uint16_t> dense(static_cast<size_t>(kTileTokens) * padded);
    for (int64_t task; (task = queue.next()) >= 0;) {
      int const kv_head = static_cast<int>(task / run.tiles),
                tile = run.first_tile + static_cast<int>(task % run.tiles);
      int64_t const first = task * kTileTokens * head_dim;
      int64_t const index = compress::find_slot(pool.keys, run.sequence, kv_head, tile);
      if (index == compress::kNoSlot) {
        std::fill_n(keys + first, kTileTokens * head_dim, uint16_t{0});
        std::fill_n(values + first, kTileTokens * head_dim, uint16_t{0});
        missing = true;
        continue;
      }
      for (SparseView const* view : {&pool.keys, &pool.values}) {
        read_block(*view, view->blocks + view->first_row(index) * kLanes, view->channel_scale_of(run.sequence, kv_head),
                   view->rows(index), dense.data());
        scatter_tile(dense.data(), view->token_order + index * kTileTokens, channels_of(*view, run.sequence, kv_head),
                     padded, head_dim, kTileTokens, (view == &pool.keys ? keys : values) + first);
      }
    }
  });
  if (missing) *pool.error = 1;
}

}  // namespace cute_kernels::cpu
