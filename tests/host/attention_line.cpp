// Attention's line of work: its pieces follow one another to the end, and the second kernel finds exactly the pieces
// that have units of a segment, be lengths on the device or not.
#include <random>
#include <vector>

#include "check.hpp"
#include "device_names.hpp"
// After the names:
#include "cute_kernels/attention/work.hpp"

using namespace cute_kernels::attention;

struct Traits {
  static constexpr bool kPlain = false;
  static constexpr int kN = 8, kHeadDim = 128;
};

struct Case {
  int batch, heads, tokens, window, ctas, workers;
  bool ragged;
};

void check_line(const Case& c, const std::vector<int>& lengths, const std::vector<int>& window_lengths) {
  int segments = c.batch * c.heads, units_each = static_cast<int>(units_of(c.tokens, c.window));
  int ctas = std::min(c.ctas, segments * units_each), workers = std::min(c.workers, segments * units_each / ctas);
  int pieces = ctas * workers;
  auto divisor = [](int x) { return cutlass::FastDivmod(x); };
  Params params{};
  params.batch = c.batch, params.rows = 4, params.workers = workers, params.ragged = c.ragged;
  params.keys.tokens = c.tokens, params.window.tokens = c.window;
  params.units_per_segment = divisor(units_each),
  params.places_per_segment = divisor(units_each + segment_places(false));
  params.row_segments = divisor(c.heads), params.row_blocks = divisor(1), params.pieces = divisor(pieces);
  params.cut.all = segments * (units_each + segment_places(false));
  params.pieces(params.cut.piece, params.cut.spare, params.cut.all);
  params.longest = params.cut.longest();

  std::vector<int> shared(line_bytes(c.ragged, c.batch) / sizeof(int));
  int all_units = segments * units_each;
  if (c.ragged) {  // what prepare() leaves there
    params.lengths = lengths.data(), params.window.lengths = window_lengths.data();
    int* ends = shared.data() + kMaxWorkers + 1;
    for (int row = 0; row < c.batch; ++row)
      ends[row + 1] = ends[row] + static_cast<int>(units_of(lengths[row], window_lengths[row]));
    auto& cut = *reinterpret_cast<Cut*>(ends + c.batch + 1);
    cut.all = (ends[c.batch] + segment_places(true) * c.batch) * c.heads;
    params.pieces(cut.piece, cut.spare, cut.all);
    all_units = ends[c.batch] * c.heads;
  }
  WorkLine<Traits> line(params, shared.data());

  std::vector<int> begins(pieces + 1);
  for (int i = 0; i <= pieces; ++i) begins[i] = line.piece_begin(i);
  check(begins[0] == 0 && begins[pieces] == all_units, "pieces cover the line", begins[pieces], all_units);
  for (int i = 0; i < pieces; ++i) {
    int units = begins[i + 1] - begins[i];
    check(units >= 0 && units <= line.longest(), "no piece is longer than the longest", units, line.longest());
  }
  for (int index = 0; index < segments; ++index) {
    Segment segment = line.segment(index);
    UnitRange units = segment.units;
    for (int unit : {units.begin, units.end - 1})
      check(line.segment_with(unit).index == index, "a unit's segment", unit, index);
    int first = line.piece_with(segment, units.begin), last = line.piece_with(segment, units.end - 1);
    for (int i = 0; i < pieces; ++i) {
      bool has_units = std::max(begins[i], units.begin) < std::min(begins[i + 1], units.end);
      bool found = first <= i && i <= last && !line.is_empty(i);
      check(has_units == found, "the pieces that have units of a segment", i, index, first, last);
    }
  }
}

int main() {
  std::mt19937 random(std::random_device{}());
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 1000; ++i) {
    Case c{draw(1, 6),   draw(1, 4), draw(0, 3000),  draw(0, 3) ? draw(0, 140) : 0,
           draw(1, 132), draw(1, 8), draw(0, 1) == 1};
    std::vector<int> lengths(c.batch), window_lengths(c.batch);
    for (int& length : lengths) length = draw(0, c.tokens);
    for (int& length : window_lengths) length = draw(0, c.window);
    check_line(c, lengths, window_lengths);
  }
  return report();
}
