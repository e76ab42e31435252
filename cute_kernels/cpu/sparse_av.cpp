// p V: a head's tiles are cut into pieces that depend on the shape only, and the pieces are summed in order, so the
// result does not depend on how many threads there are or on their timing.
#include "cute_kernels/cpu/value_sums.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kTileTokens;

constexpr int64_t kTargetTasks = 256;      // for up to this many threads to be busy
constexpr int64_t kMinTilesPerPiece = 16;  // below, summing the pieces outweighs the tiles

}  // namespace

void sparse_av(const SparseView& view, const DenseOperand& p, uint16_t* out, int threads) {
  const Kernels& isa = kernels();
  const QueryRows query(view, p);
  const int padded = view.padded_head_dim;
  const int64_t tiles = view.tiles_per_head(), segments = view.heads() * query.blocks;
  if (segments == 0) return;
  const int64_t tiles_per_piece =
      std::max(kMinTilesPerPiece, ceil_div(tiles, std::max<int64_t>(1, kTargetTasks / segments)));
  const int64_t pieces = std::max<int64_t>(1, ceil_div(tiles, tiles_per_piece));
  const int64_t rows_at_most = std::min<int64_t>(query.per_head, kRowsPerTask);
  const int64_t out_size = rows_at_most * padded;
  AlignedArray<float> partials(pieces > 1 ? segments * pieces * out_size : 0);  // (segments, pieces, rows, padded)

  auto rows_of = [&](int64_t segment) {
    return static_cast<int>(std::min<int64_t>(kRowsPerTask, query.per_head - segment % query.blocks * kRowsPerTask));
  };
  auto store = [&](int64_t segment, const float* by_channel) {
    const int64_t head = segment / query.blocks, row = head * query.per_head + segment % query.blocks * kRowsPerTask;
    for (int n = 0; n < rows_of(segment); ++n)
      store_row(by_channel + n * padded, view.head_dim, view.dtype, out + (row + n) * view.head_dim);
  };

  parallel(threads, segments * pieces, [&](TaskQueue& queue) {
    ValueSums sums(isa, view, p.dtype, rows_at_most);
    AlignedArray<float> whole(pieces > 1 ? 0 : out_size);
    for (int64_t task; (task = queue.next()) >= 0;) {
      const int64_t piece = task % pieces, segment = task / pieces;
      float* by_channel = pieces > 1 ? partials.data() + task * out_size : whole.data();
      const int64_t head = segment / query.blocks, first_row = segment % query.blocks * kRowsPerTask;
      const int rows = rows_of(segment);
      sums.clear();
      for (int64_t tile = piece * tiles_per_piece; tile < std::min((piece + 1) * tiles_per_piece, tiles); ++tile) {
        const int64_t tile_index = head * tiles + tile;
        const int valid = static_cast<int>(std::min<int64_t>(kTileTokens, view.tokens - tile * kTileTokens));
        sums.add(tile_index, next_tile(view, tile_index), rows, valid, [&](int n) {
          const int64_t offset = row_offset(view, p, query.group, head, first_row + n) + tile * kTileTokens;
          return element_pointer(p.data, p.dtype, offset);
        });
      }
      sums.store(view.channel_order + head * padded, rows, by_channel);
      if (pieces == 1) store(segment, by_channel);
    }
  });
  if (pieces == 1) return;

  // Few numbers: more threads than one are worth starting only for large batches.
  const int64_t useful = segments * pieces * out_size / (1 << 19) + 1;
  parallel(static_cast<int>(std::min<int64_t>(threads, useful)), segments, [&](TaskQueue& queue) {
    for (int64_t segment; (segment = queue.next()) >= 0;) {
      float* sum = partials.data() + segment * pieces * out_size;
      const int64_t size = int64_t{rows_of(segment)} * padded;
      for (int64_t piece = 1; piece < pieces; ++piece)
        for (int64_t i = 0; i < size; ++i) sum[i] += sum[piece * out_size + i];
      store(segment, sum);
    }
  });
}

}  // namespace cute_kernels::cpu
