// How work is partitioned: splits cover every compressed tile and every window tile once, and are as even as can be.
#include "cute_kernels/schedule/partition.hpp"

#include <random>
#include <vector>

#include "check.hpp"
#include "cute_kernels/schedule/cost.hpp"

using namespace cute_kernels::schedule;

Partition make(int total, int splits) { return make_partition(total, cutlass::FastDivmod(splits)); }

void check_partition(int all, int splits) {
  Partition partition = make(all, splits);
  cutlass::FastDivmod divisor(splits);
  check(partition.begin(0, divisor) == 0 && partition.begin(splits, divisor) == all, "splits cover all", all, splits);
  for (int i = 0; i < splits; ++i) {
    int length = partition.begin(i + 1, divisor) - partition.begin(i, divisor);
    check(length >= all / splits && length <= partition.longest(), "splits differ by one", all, splits, i);
  }
}

// `begin`: the work tile's first KV tile in the schedule. window_cost: tiles that a window tile counts as.
void check_work_tile(int tiles, int window_tiles, int window_cost, int splits, int begin) {
  Partition partition = make(tiles + window_cost * window_tiles, splits);
  cutlass::FastDivmod divisor(splits);
  WorkTilePartition work_tile{divisor, partition, window_tiles, window_cost};
  std::vector<int> tile_seen(tiles), window_seen(window_tiles);
  int longest_window = (window_tiles + splits - 1) / splits;
  check(work_tile.window_tiles_before(1) == longest_window, "the first split has most of the window", window_tiles,
        splits);
  for (int i = 0; i < splits; ++i) {
    int first = begin + work_tile.tiles_before(i), end = begin + work_tile.tiles_before(i + 1), windows = 0;
    KvTileMap map = work_tile.tile_map(begin, i);
    for (int tile = first; tile < end; ++tile) {
      bool in_window = tile < map.window_end;
      int index = tile - (in_window ? map.first_window : map.first_tile);
      auto& seen = in_window ? window_seen : tile_seen;
      if (check(index >= 0 && index < static_cast<int>(seen.size()), "a KV tile of the work tile", tile, index, i))
        ++seen[index];
      windows += in_window;
    }
    check(windows == 0 || windows >= window_tiles / splits, "the window is spread", windows, i);
    int tiles_here = end - first - windows, cost = tiles_here + window_cost * windows;
    check(windows <= longest_window && cost >= partition.size && cost <= partition.longest(), "as even as can be", i,
          cost);
    check(tiles_here > 0 && end - first <= work_tile.longest(), "every split has tiles, none too many", i, tiles,
          splits);
  }
  for (int seen : tile_seen) check(seen == 1, "every tile once", seen, tiles, splits);
  for (int seen : window_seen) check(seen == 1, "every window tile once", seen, window_tiles, splits);
}

int main() {
  std::mt19937 random(std::random_device{}());
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 1000; ++i) {
    check_partition(draw(0, 2000), draw(1, 1100));
    int splits = draw(1, 64);
    int tiles = splits + draw(0, 300), window_tiles = draw(0, 3) ? draw(0, 8) : draw(0, 200), begin = draw(0, 1000);
    for (int cost : {0, window_tile_cost(tiles, window_tiles, splits)})
      check_work_tile(tiles, window_tiles, cost, splits, begin);
  }
  return report();
}
