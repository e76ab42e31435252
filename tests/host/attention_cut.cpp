// How attention cuts its work: pieces cover every tile and every unit of the window once, and are as even as can be.
#include <random>
#include <vector>

#include "check.hpp"
#include "cute_kernels/attention/cut.hpp"

using namespace cute_kernels::attention;

Cut make_cut(int all, int pieces) { return {all, all / pieces, all % pieces}; }

void check_cut(int all, int pieces) {
  Cut cut = make_cut(all, pieces);
  cutlass::FastDivmod divisor(pieces);
  check(cut.begin(0, divisor) == 0 && cut.begin(pieces, divisor) == all, "pieces cover all", all, pieces);
  for (int i = 0; i < pieces; ++i) {
    int length = cut.begin(i + 1, divisor) - cut.begin(i, divisor);
    check(length >= all / pieces && length <= cut.longest(), "pieces differ by one", all, pieces, i);
  }
}

// `begin`: of the segment's units in the line. window_places: tiles that a unit of the window counts as.
void check_segment(int tiles, int window_units, int window_places, int pieces, int begin) {
  Cut cut = make_cut(tiles + window_places * window_units, pieces);
  cutlass::FastDivmod divisor(pieces);
  SegmentCut segment{divisor, cut, window_units, window_places};
  std::vector<int> tile_seen(tiles), window_seen(window_units);
  int longest_window = (window_units + pieces - 1) / pieces;
  check(segment.window_units_before(1) == longest_window, "the first piece has most of the window", window_units,
        pieces);
  for (int i = 0; i < pieces; ++i) {
    int first = begin + segment.units_before(i), end = begin + segment.units_before(i + 1), windows = 0;
    UnitMap map = segment.unit_map(begin, i);
    for (int unit = first; unit < end; ++unit) {
      bool in_window = unit < map.window_end;
      int index = unit - (in_window ? map.first_window : map.first_tile);
      auto& seen = in_window ? window_seen : tile_seen;
      if (check(index >= 0 && index < static_cast<int>(seen.size()), "a unit of the segment", unit, index, i))
        ++seen[index];
      windows += in_window;
    }
    check(windows == 0 || windows >= window_units / pieces, "the window is spread", windows, i);
    int tiles_here = end - first - windows, places = tiles_here + window_places * windows;
    check(windows <= longest_window && places >= cut.piece && places <= cut.longest(), "as even as can be", i, places);
    check(tiles_here > 0 && end - first <= segment.longest(), "every piece has tiles, none too many", i, tiles, pieces);
  }
  for (int seen : tile_seen) check(seen == 1, "every tile once", seen, tiles, pieces);
  for (int seen : window_seen) check(seen == 1, "every unit of the window once", seen, window_units, pieces);
}

int main() {
  std::mt19937 random(std::random_device{}());
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 1000; ++i) {
    check_cut(draw(0, 2000), draw(1, 1100));
    int pieces = draw(1, 64);
    int tiles = pieces + draw(0, 300), window_units = draw(0, 3) ? draw(0, 8) : draw(0, 200), begin = draw(0, 1000);
    for (int places : {0, window_places(tiles, window_units, pieces)})
      check_segment(tiles, window_units, places, pieces, begin);
  }
  return report();
}
