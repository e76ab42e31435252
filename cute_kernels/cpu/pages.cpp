// Compression into a pool of pages and back, tile by tile.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "cute_kernels/common/numeric.hpp"
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

uint8_t* channels_of(const SparseView& view, int sequence, int64_t kv_head) {
  return const_cast<uint8_t*>(view.channel_order) +
         (int64_t{sequence} * view.kv_heads + kv_head) * view.padded_head_dim;
}

// Channels, densest first, ties by lower channel, go to the classes back and forth.
void deal(const int32_t* counts, int padded, uint8_t* order) {
  std::vector<uint8_t> densest(padded);
  std::iota(densest.begin(), densest.end(), uint8_t{0});
  std::stable_sort(densest.begin(), densest.end(), [&](int a, int b) { return counts[a] > counts[b]; });
  for (int rank = 0; rank < padded; ++rank) {
    int place = rank % kClasses;
    bool forth = rank / kClasses % 2 == 0;
    order[rank - place + (forth ? place : kClasses - 1 - place)] = densest[rank];
  }
}

void deal_rows(const SparseView& view, int keep, const DenseView& x, const PoolRows& rows, NewOrder order,
               int threads) {
  if (order == NewOrder::kNever) return;
  const int padded = view.padded_head_dim;
  std::vector<int32_t> counts(static_cast<size_t>(x.batch) * x.kv_heads * padded);
  select(x, keep, nullptr, counts.data(), nullptr, threads);
  for (int i = 0; i < x.batch; ++i)
    for (int h = 0; h < x.kv_heads; ++h)
      if (rows.sequences[i] >= 0 && rows.sequences[i] < view.batch && compress::deals(order, rows.first_tiles[i]))
        deal(counts.data() + (int64_t{i} * x.kv_heads + h) * padded, padded, channels_of(view, rows.sequences[i], h));
}

// One cache's part in the making of a tile.
struct Operand {
  const SparseView& view;
  const DenseView& x;
  int keep;
  const uint16_t* positions;
  std::vector<uint32_t> masks;

  Operand(const SparseView& view, const DenseView& x, int keep)
      : view(view),
        x(x),
        keep(keep),
        positions(element_table(view.role, view.padded_head_dim).data()),
        masks(static_cast<size_t>(kTileTokens) * view.padded_head_dim / 32) {}

  void select_tile(int64_t head, int64_t first_token, const uint8_t* channels, uint8_t* counts) {
    const int padded = view.padded_head_dim;
    for (int t = 0; t < kTileTokens; ++t)
      kernels().select_row(x.row(head, first_token + t), x.head_dim, padded, x.dtype == DType::kBFloat16, keep,
                           masks.data() + t * (padded / 32), nullptr, nullptr);
    count_classes(masks.data(), kTileTokens, channels, padded, counts, 2 * kClasses);
  }

  // Streams that are `longest` keep at most so many values. Nonzeros that did not fit.
  int pack_tile(int64_t head, int64_t first_token, const uint8_t* channels, const uint8_t* token_order, int longest,
                int most, int64_t index, uint16_t* dense) const {
    const int padded = view.padded_head_dim;
    gather_tile(x, head, first_token, masks.data(), token_order, channels, padded, dense);
    int dropped = longest > most ? trim_streams(dense, positions, padded, most, x.dtype) : 0;
    const int rows = format::tile_rows(padded, std::min(longest, most));
    write_block(dense, positions, padded, rows, const_cast<uint32_t*>(view.blocks) + view.first_row(index) * kLanes);
    const_cast<int32_t*>(view.row_offsets)[index] = rows;
    return dropped;
  }
};

}  // namespace

void store(const Pool& pool, const DenseView& k, const DenseView& v, const PoolRows& rows, NewOrder order,
           int threads) {
  const int padded = pool.keys.padded_head_dim;
  deal_rows(pool.keys, pool.key_keep, k, rows, order, threads);
  deal_rows(pool.values, pool.value_keep, v, rows, order, threads);

  const int64_t tiles = k.tokens / kTileTokens;
  const compress::SlotLimits limits(pool);
  std::atomic<int64_t> dropped[4] = {};
  std::atomic<bool> missing{false};
  parallel(threads, int64_t{k.batch} * k.kv_heads * tiles, [&](TaskQueue& queue) {
    Operand operands[] = {{pool.keys, k, pool.key_keep}, {pool.values, v, pool.value_keep}};
    std::vector<uint16_t> dense(static_cast<size_t>(kTileTokens) * padded);
    format::TokenCounts<2 * kClasses> counts;
    for (int64_t task; (task = queue.next()) >= 0;) {
      const int64_t head = task / tiles, first_token = task % tiles * kTileTokens;
      const int row = static_cast<int>(head / k.kv_heads), kv_head = static_cast<int>(head % k.kv_heads);
      const int sequence = rows.sequences[row];
      const int64_t tile = rows.first_tiles[row] + task % tiles;
      if (sequence < 0) continue;
      const int64_t index = compress::find_slot(pool.keys, sequence, kv_head, tile);
      if (index == compress::kNoSlot) {
        missing = true;
        continue;
      }
      uint8_t* token_order = const_cast<uint8_t*>(pool.keys.token_order) + index * kTileTokens;
      for (int o = 0; o < 2; ++o)
        operands[o].select_tile(head, first_token, channels_of(operands[o].view, sequence, kv_head),
                                &counts.count[0][o * kClasses]);
      format::choose_token_order(counts, token_order);
      const int longest_key = format::longest_stream(counts, token_order);
      const int bound[] = {limits.keys(longest_key), limits.values(longest_key)};
      format::fit_token_order(counts, bound, token_order);
      const int longest[] = {format::longest_stream(counts, token_order),
                             format::longest_stream(counts, token_order, kClasses)};
      const int most[] = {limits.most_keys, limits.values(longest[0])};
      for (int o = 0; o < 2; ++o) {  // keys first: the values' block follows theirs
        const uint8_t* channels = channels_of(operands[o].view, sequence, kv_head);
        const int lost = operands[o].pack_tile(head, first_token, channels, token_order, longest[o], most[o], index,
                                               dense.data());
        if (lost) dropped[2 * o] += 1, dropped[2 * o + 1] += lost;
      }
    }
  });
  for (int i = 0; i < 4; ++i) pool.dropped[i] += dropped[i];
  if (missing) *pool.error = 1;
}

void load(const Pool& pool, const compress::TileRun& run, uint16_t* keys, uint16_t* values, int threads) {
  const int padded = pool.keys.padded_head_dim, head_dim = pool.keys.head_dim;
  std::atomic<bool> missing{false};
  parallel(threads, int64_t{pool.keys.kv_heads} * run.tiles, [&](TaskQueue& queue) {
    std::vector<uint16_t> dense(static_cast<size_t>(kTileTokens) * padded);
    for (int64_t task; (task = queue.next()) >= 0;) {
      const int kv_head = static_cast<int>(task / run.tiles),
                tile = run.first_tile + static_cast<int>(task % run.tiles);
      const int64_t first = task * kTileTokens * head_dim;
      const int64_t index = compress::find_slot(pool.keys, run.sequence, kv_head, tile);
      if (index == compress::kNoSlot) {
        std::fill_n(keys + first, kTileTokens * head_dim, uint16_t{0});
        std::fill_n(values + first, kTileTokens * head_dim, uint16_t{0});
        missing = true;
        continue;
      }
      for (const SparseView* view : {&pool.keys, &pool.values}) {
        read_block(view->blocks + view->first_row(index) * kLanes, element_table(view->role, padded).data(), padded,
                   view->rows(index), dense.data());
        scatter_tile(dense.data(), view->token_order + index * kTileTokens, channels_of(*view, run.sequence, kv_head),
                     padded, head_dim, kTileTokens, (view == &pool.keys ? keys : values) + first);
      }
    }
  });
  if (missing) *pool.error = 1;
}

}  // namespace cute_kernels::cpu
