// q K^T: every tile's logits are independent of every other's.
#include "cute_kernels/cpu/key_logits.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kTileTokens;

constexpr int64_t kTasksPerThread = 8;   // enough for threads to finish together
constexpr int64_t kMinTilesPerTask = 4;  // below, preparing q outweighs the tiles

}  // namespace

void sparse_qk(const SparseView& view, const DenseOperand& q, float scale, void* out, DType out_dtype, int threads) {
  const Kernels& isa = kernels();
  const QueryRows query(view, q);
  const int64_t tiles = view.tiles_per_head(), segments = view.heads() * query.blocks;
  if (tiles == 0 || segments == 0) return;
  const int64_t tiles_per_task = std::clamp<int64_t>(ceil_div(segments * tiles, kTasksPerThread * std::max(threads, 1)),
                                                     std::min(kMinTilesPerTask, tiles), tiles);
  const int64_t pieces = ceil_div(tiles, tiles_per_task);

  parallel(threads, segments * pieces, [&](TaskQueue& queue) {
    KeyLogits logits(isa, view, std::min<int64_t>(query.per_head, kRowsPerTask));
    for (int64_t task; (task = queue.next()) >= 0;) {
      const int64_t piece = task % pieces, block = task / pieces % query.blocks, head = task / pieces / query.blocks;
      const int64_t first_row = block * kRowsPerTask;
      const int rows = static_cast<int>(std::min<int64_t>(kRowsPerTask, query.per_head - first_row));
      logits.load(q, query.group, head, view.channel_order + head * view.padded_head_dim, first_row, rows);

      for (int64_t tile = piece * tiles_per_task; tile < std::min((piece + 1) * tiles_per_task, tiles); ++tile) {
        const int64_t tile_index = head * tiles + tile;
        logits.multiply(tile_index, next_tile(view, tile_index));
        const int valid = static_cast<int>(std::min<int64_t>(kTileTokens, view.tokens - tile * kTileTokens));
        for (int n = 0; n < rows; ++n) {
          const int64_t offset = (head * query.per_head + first_row + n) * view.tokens + tile * kTileTokens;
          logits.store(n, scale, valid, out_dtype, const_cast<void*>(element_pointer(out, out_dtype, offset)));
        }
      }
    }
  });
}

}  // namespace cute_kernels::cpu
