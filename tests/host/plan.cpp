// How work is laid over a device: pieces cover the tiles, and plans fit every device.
#include <algorithm>
#include <random>
#include <stdexcept>

#include "check.hpp"
#include "cute_kernels/dispatch/heuristics.hpp"
#include "cute_kernels/matmul/tile_scheduler.hpp"

using namespace cute_kernels;
using dispatch::choose_plan;
using dispatch::DeviceLimits;

// pieces: of the line, or of every segment.
matmul::Work make_work(int heads, int row_blocks, int tiles_per_head, int pieces, bool by_segments) {
  matmul::Work work{};
  work.tiles = heads * row_blocks * tiles_per_head;
  work.by_segments = by_segments;
  work.part_tiles = by_segments ? tiles_per_head : work.tiles;
  work.pieces = cutlass::FastDivmod(pieces);
  work.tiles_per_piece = work.part_tiles / pieces;
  work.spare_tiles = work.part_tiles % pieces;
  work.tiles_per_segment = cutlass::FastDivmod(tiles_per_head);
  work.row_blocks = cutlass::FastDivmod(row_blocks);
  work.rows = 8 * row_blocks - 3;
  return work;
}

void check_pieces(matmul::Work const& work, int tiles_per_head, int row_blocks) {
  check(matmul::piece_begin(work, 0) == 0, "the first piece starts at the first tile");
  int pieces = work.pieces.divisor * (work.tiles / work.part_tiles);
  check(matmul::piece_begin(work, pieces) == work.tiles, "the last piece ends at the last tile");
  for (int piece = 0; piece < pieces; ++piece) {
    matmul::TileRange range = matmul::piece_tiles(work, piece);
    int tiles = range.end - range.begin;
    check(tiles == work.tiles_per_piece || tiles == work.tiles_per_piece + 1, "pieces differ by one tile", piece,
          tiles);
    check(tiles > 0, "no piece is empty", piece, work.tiles, pieces);
    if (work.by_segments) {
      int segment = piece / work.pieces.divisor;
      check(range.begin / tiles_per_head == segment && (range.end - 1) / tiles_per_head == segment,
            "pieces end where segments do", piece);
    }
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

// A ring for all workers: producers divide workers and stages, and see every phase of their stages.
void check_ring(dispatch::Plan const& plan) {
  int workers = plan.config.workers, stages = plan.stages.count, producers = plan.config.producers;
  check(producers >= 1 && producers <= dispatch::kMaxProducers, "producers", producers);
  check(workers % producers == 0 && stages % producers == 0, "producers divide workers and stages", workers, stages);
  check(stages >= workers, "a stage for every worker", workers, stages);
}

// So many stages ahead as are asked for, or an error. fit: stages that shared memory has room for.
template <class F>
void check_tuned(matmul::KernelLimits const& kernel, F&& plan_with, int fit, int ahead) {
  int room = std::min(fit, kernel.max_stages);
  try {
    dispatch::Plan plan = plan_with(ahead);
    int workers = plan.config.workers, stages = plan.stages.count, producers = plan.config.producers;
    check(ahead < room, "no plan has more stages than there is room for", ahead, room);
    check(workers >= 1 && workers <= kernel.max_workers, "workers of a tuned plan", workers);
    if (!kernel.one_ring) {
      check(stages == ahead + 1 && stages * workers <= fit, "stages of a worker", stages, ahead);
      return;
    }
    check_ring(plan);
    check(stages <= room && stages <= workers + ahead && stages > workers + ahead - producers, "stages of a tuned ring",
          stages, ahead);
  } catch (std::runtime_error const&) {
    check(ahead >= room, "stages that there is room for can be had", ahead, room);
  }
}

// Cutting at segments' ends is about as even, and gives every cluster whole segments.
void check_segments(DeviceLimits const& device, matmul::Config config, int segments, int tiles_per_segment) {
  auto ceil_div = [](int a, int b) { return (a + b - 1) / b; };
  int tiles = segments * tiles_per_segment, longest = ceil_div(tiles, config.ctas * config.workers);
  int of_a_cta = ceil_div(tiles, config.ctas);
  dispatch::cut_by_segments(device, segments, tiles_per_segment, config);
  int log2 = 0;
  while (1 << log2 < config.cluster) ++log2;
  check(1 << log2 == config.cluster && log2 <= dispatch::kMaxClusterLog2, "cluster", config.cluster);
  if (config.segment_pieces == 0) return void(check(config.cluster == 1, "no clusters without segments"));
  int pieces = config.segment_pieces;
  check(pieces * segments == config.ctas * config.workers, "a piece for every worker", pieces, config.ctas);
  check(ceil_div(tiles_per_segment, pieces) <= longest + 1, "pieces are longer by a tile at most", pieces, longest);
  check(ceil_div(tiles, config.ctas) <= of_a_cta + dispatch::kTilesOfCombine, "a CTA has few tiles more", config.ctas);
  check(config.cluster * config.workers % pieces == 0, "clusters have whole segments", pieces, config.cluster);
  check(config.cluster == 1 || config.cluster * config.workers == pieces, "a cluster has one segment", pieces);
  int clusters = log2 > 0 ? device.max_clusters[log2] : device.multiprocessors;
  check(config.ctas % config.cluster == 0 && config.ctas / config.cluster <= clusters, "clusters fit", config.ctas);
}

int main() {
  std::mt19937 random(std::random_device{}());
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  const DeviceLimits devices[] = {
      {132, 232448, 9, 0, true, {0, 66, 32, 16, 8}}, {108, 166912, 8, 0, false}, {84, 101376, 8, 6, false}};
  for (int i = 0; i < 500; ++i) {
    int heads = draw(1, 12), row_blocks = draw(1, 3), tiles_per_head = draw(1, 60);
    int64_t tiles = int64_t{heads} * row_blocks * tiles_per_head;
    for (DeviceLimits const& device : devices) {
      int head_dim = 64 << draw(0, 2), n = draw(0, 1) ? 8 : 16, longest = draw(0, head_dim),
          row_bytes = draw(0, 1) ? 272 : 0;
      bool one_ring = draw(0, 1);
      matmul::KernelLimits kernel{
          4 * draw(1, 4), draw(0, 1) ? 1 : 4, 2,       one_ring ? 48 : draw(3, 8), n * 64 * 4, 64,
          one_ring,       draw(2, 16),        one_ring};
      int rows = draw(1, 40);
      auto plan_with = [&](int stages_ahead) {
        return choose_plan(device, kernel, n, rows, format::tile_rows(head_dim, longest), 64, row_bytes, tiles,
                           {stages_ahead});
      };
      auto plan = plan_with(0);
      int stage_bytes = plan.stages.stage_bytes, workers = plan.config.workers;
      check_tuned(kernel, plan_with, (device.shared_bytes - kernel.fixed_shared_bytes) / stage_bytes, draw(1, 50));
      check(workers >= 1 && workers <= kernel.max_workers, "workers", workers);
      check(plan.stages.count >= (one_ring ? 1 : 2) && plan.stages.count <= kernel.max_stages, "stages",
            plan.stages.count);
      int stages = one_ring ? plan.stages.count : workers * plan.stages.count;
      check(stages * stage_bytes + kernel.fixed_shared_bytes <= device.shared_bytes, "shared memory", stage_bytes);
      if (one_ring) check_ring(plan);
      check(plan.stages.block_bytes >= format::tile_rows(head_dim, longest) * format::kRowBytes,
            "a stage holds the longest block");
      check(stage_bytes - plan.stages.block_bytes >= format::kRowsBehind * format::kRowBytes,
            "and the rows behind it that decoders may read");
      check(plan.stages.block_bytes % 128 == 0 && stage_bytes % 128 == 0, "stages are aligned");
      check(plan.config.ctas <= device.multiprocessors, "one CTA an SM", plan.config.ctas);
      check_pieces(make_work(heads, row_blocks, tiles_per_head, plan.config.ctas * workers, false), tiles_per_head,
                   row_blocks);
      if (!one_ring) continue;
      check_segments(device, plan.config, heads * row_blocks, tiles_per_head);
      dispatch::cut_by_segments(device, heads * row_blocks, tiles_per_head, plan.config);
      if (plan.config.segment_pieces > 0)
        check_pieces(make_work(heads, row_blocks, tiles_per_head, plan.config.segment_pieces, true), tiles_per_head,
                     row_blocks);
    }
  }
  return report();
}
