// q K^T: every tile's logits are independent of every other's.
#include "cute_kernels/cpu/key_logits.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kTileTokens;

constexpr int64_t kTasksPerThread = 8;   // enough for threads to finish together
constexpr int64_t kMinTilesPerTask = 4;  // below, loading q outweighs the tiles

}  // namespace

void sparse_qk(SparseView const& view, DenseOperand const& q, float scale, void* out, DType out_dtype, int threads) {
  Kernels const& isa = kernels();
  QueryRows const query(view, q);
  int64_t const tiles = view.tiles_per_head(), work_tiles = view.heads() * query.blocks;
  if (tiles == 0 || work_tiles == 0) return;
  int64_t const tiles_per_task = std::clamp<int64_t>(
      ceil_div(work_tiles * tiles, kTasksPerThread * std::max(threads, 1)), std::min(kMinTilesPerTask, tiles), tiles);
  int64_t const splits = ceil_div(tiles, tiles_per_task);

  parallel(threads, work_tiles * splits, [&](TaskQueue& queue) {
    KeyLogits logits(isa, view, std::min<int64_t>(query.per_head, kRowsPerTask));
    for (int64_t task; (task = queue.next()) >= 0;) {
      int64_t const split = task % splits, block = task / splits % query.blocks, head = task / splits / query.blocks;
      int64_t const first_row = block * kRowsPerTask;
      int const rows = static_cast<int>(std::min<int64_t>(kRowsPerTask, query.per_head - first_row));
      logits.load(q, query.group, head, view.channel_order + head * view.padded_head_dim, first_row, rows);

      for (int64_t tile = split * tiles_per_task; tile < std::min((split + 1) * tiles_per_task, tiles); ++tile) {
        int64_t const tile_index = head * tiles + tile;
        logits.multiply(tile_index, next_tile(view, tile_index));
        int const valid = static_cast<int>(std::min<int64_t>(kTileTokens, view.tokens - tile * kTileTokens));
        for (int n = 0; n < rows; ++n) {
          int64_t const offset = (head * query.per_head + first_row + n) * view.tokens + tile * kTileTokens;
          logits.store(n, scale, valid, out_dtype, const_cast<void*>(element_pointer(out, out_dtype, offset)));
        }
      }
    }
  });
}

}  // namespace cute_kernels::cpu
