// How work is laid over a device: pieces cover the tiles, and plans fit every device.
#include <random>

#include "check.hpp"
#include "cute_kernels/dispatch/heuristics.hpp"
#include "cute_kernels/matmul/tile_scheduler.hpp"

using namespace cute_kernels;
using dispatch::choose_plan;
using dispatch::DeviceLimits;

matmul::Work make_work(int heads, int row_blocks, int tiles_per_head, int pieces) {
  matmul::Work work{};
  work.tiles = heads * row_blocks * tiles_per_head;
  work.pieces = pieces;
  work.tiles_per_piece = work.tiles / pieces;
  work.spare_tiles = work.tiles % pieces;
  work.tiles_per_segment = cutlass::FastDivmod(tiles_per_head);
  work.row_blocks = cutlass::FastDivmod(row_blocks);
  work.rows = 8 * row_blocks - 3;
  return work;
}

void check_pieces(matmul::Work const& work, int tiles_per_head, int row_blocks) {
  check(matmul::piece_begin(work, 0) == 0, "the first piece starts at the first tile");
  check(matmul::piece_begin(work, work.pieces) == work.tiles, "the last piece ends at the last tile");
  for (int piece = 0; piece < work.pieces; ++piece) {
    matmul::TileRange range = matmul::piece_tiles(work, piece);
    int tiles = range.end - range.begin;
    check(tiles == work.tiles_per_piece || tiles == work.tiles_per_piece + 1, "pieces differ by one tile", piece,
          tiles);
    check(tiles > 0, "no piece is empty", piece, work.tiles, work.pieces);
    for (int tile : {range.begin, range.end - 1})
      check(matmul::piece_of_tile(work, tile) == piece, "piece_of_tile inverts piece_tiles", tile, piece);
  }
  for (int tile = 0; tile < work.tiles; ++tile) {
    int index = tile / tiles_per_head;
    matmul::Segment segment = matmul::segment_at<8>(work, index);
    check(segment.tiles.begin <= tile && tile < segment.tiles.end, "a segment holds its tiles", tile);
    check(segment.head == index / row_blocks && segment.first_row == 8 * (index % row_blocks),
          "segments of a head follow", index);
    check(
        segment.first_row + segment.rows == (index % row_blocks == row_blocks - 1 ? work.rows : segment.first_row + 8),
        "blocks of rows cover the rows", index);
    check(matmul::storage_tile(work, tile) == int64_t{segment.head} * tiles_per_head + tile % tiles_per_head,
          "every block of rows reads the head's tiles", tile);
  }
}

int main() {
  std::mt19937 random(std::random_device{}());
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  const DeviceLimits devices[] = {{132, 232448, 9, 0, true}, {108, 166912, 8, 0, false}, {84, 101376, 8, 6, false}};
  for (int i = 0; i < 500; ++i) {
    int heads = draw(1, 12), row_blocks = draw(1, 3), tiles_per_head = draw(1, 60);
    int64_t tiles = int64_t{heads} * row_blocks * tiles_per_head;
    for (DeviceLimits const& device : devices) {
      int head_dim = 64 << draw(0, 2), n = draw(0, 1) ? 8 : 16, longest = draw(0, head_dim),
          row_bytes = draw(0, 1) ? 272 : 0;
      matmul::KernelLimits kernel{4 * draw(1, 4), draw(0, 1) ? 1 : 4, 2, draw(3, 8), n * 68 * 4, 64};
      auto plan =
          choose_plan(device, kernel, n, draw(1, 40), format::tile_rows(head_dim, longest), 64, row_bytes, tiles);
      int stage_bytes = plan.stages.stage_bytes, workers = plan.config.workers;
      check(workers >= 1 && workers <= kernel.max_workers, "workers", workers);
      check(plan.stages.count >= 2 && plan.stages.count <= kernel.max_stages, "stages", plan.stages.count);
      check(workers * plan.stages.count * stage_bytes + kernel.fixed_shared_bytes <= device.shared_bytes,
            "shared memory", stage_bytes);
      check(plan.stages.block_bytes >= format::tile_rows(head_dim, longest) * format::kRowBytes,
            "a stage holds the longest block");
      check(plan.stages.block_bytes % 128 == 0 && stage_bytes % 128 == 0, "stages are aligned");
      check(plan.config.ctas <= device.multiprocessors, "one CTA an SM", plan.config.ctas);
      check_pieces(make_work(heads, row_blocks, tiles_per_head, plan.config.ctas * workers), tiles_per_head,
                   row_blocks);
    }
  }
  return report();
}
