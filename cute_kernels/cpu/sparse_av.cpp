// p V. A work tile is a KV head and a block of its query rows. The head's tiles are divided into splits that depend on
// the shape only, and the splits are summed in order, so the result does not depend on the number of threads or on
// their timing.
#include "cute_kernels/cpu/value_sums.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kTileTokens;

constexpr int64_t kTargetTasks = 256;      // for up to this many threads to be busy
constexpr int64_t kMinTilesPerSplit = 16;  // below, summing the splits outweighs the tiles

}  // namespace

void sparse_av(SparseView const& view, DenseOperand const& p, uint16_t* out, int threads) {
  Kernels const& isa = kernels();
  QueryRows const query(view, p);
  int const padded = view.padded_head_dim;
  int64_t const tiles = view.tiles_per_head(), work_tiles = view.heads() * query.blocks;
  if (work_tiles == 0) return;
  int64_t const tiles_per_split =
      std::max(kMinTilesPerSplit, ceil_div(tiles, std::max<int64_t>(1, kTargetTasks / work_tiles)));
  int64_t const splits = std::max<int64_t>(1, ceil_div(tiles, tiles_per_split));
  int64_t const rows_at_most = std::min<int64_t>(query.per_head, kRowsPerTask);
  int64_t const out_size = rows_at_most * padded;
  AlignedArray<float> partials(splits > 1 ? work_tiles * splits * out_size : 0);  // (work_tiles, splits, rows, padded)

  auto rows_of = [&](int64_t work_tile) {
    return static_cast<int>(std::min<int64_t>(kRowsPerTask, query.per_head - work_tile % query.blocks * kRowsPerTask));
  };
  auto store = [&](int64_t work_tile, float const* by_channel) {
    int64_t const head = work_tile / query.blocks,
                  row = head * query.per_head + work_tile % query.blocks * kRowsPerTask;
    for (int n = 0; n < rows_of(work_tile); ++n)
      store_row(by_channel + n * padded, view.head_dim, view.dtype, out + (row + n) * view.head_dim);
  };

  parallel(threads, work_tiles * splits, [&](TaskQueue& queue) {
    ValueSums sums(isa, view, p.dtype, rows_at_most);
    AlignedArray<float> whole(splits > 1 ? 0 : out_size);
    for (int64_t task; (task = queue.next()) >= 0;) {
      int64_t const split = task % splits, work_tile = task / splits;
      float* by_channel = splits > 1 ? partials.data() + task * out_size : whole.data();
      int64_t const head = work_tile / query.blocks, first_row = work_tile % query.blocks * kRowsPerTask;
      int const rows = rows_of(work_tile);
      sums.clear();
      for (int64_t tile = split * tiles_per_split; tile < std::min((split + 1) * tiles_per_split, tiles); ++tile) {
        int64_t const tile_index = head * tiles + tile;
        int const valid = static_cast<int>(std::min<int64_t>(kTileTokens, view.tokens - tile * kTileTokens));
        sums.add(tile_index, next_tile(view, tile_index), rows, valid, [&](int n) {
          int64_t const offset = row_offset(view, p, query.group, head, first_row + n) + tile * kTileTokens;
          return element_pointer(p.data, p.dtype, offset);
        });
      }
      sums.store(view.channel_order + head * padded, rows, by_channel);
      if (splits == 1) store(work_tile, by_channel);
    }
  });
  if (splits == 1) return;

  // Few numbers: more threads than one are worth starting only for large batches.
  int64_t const useful = work_tiles * splits * out_size / (1 << 19) + 1;
  parallel(static_cast<int>(std::min<int64_t>(threads, useful)), work_tiles, [&](TaskQueue& queue) {
    for (int64_t work_tile; (work_tile = queue.next()) >= 0;) {
      float* sum = partials.data() + work_tile * splits * out_size;
      int64_t const size = int64_t{rows_of(work_tile)} * padded;
      for (int64_t split = 1; split < splits; ++split)
        for (int64_t i = 0; i < size; ++i) sum[i] += sum[split * out_size + i];
      store(work_tile, sum);
    }
  });
}

}  // namespace cute_kernels::cpu
