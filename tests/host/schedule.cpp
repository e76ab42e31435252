// The schedule: its splits follow one another to the end, and the second kernel finds exactly the splits that have KV
// tiles of a work tile, or their CTAs, whether lengths are on the device or not, for attention and for products.
#include <random>
#include <vector>

#include "check.hpp"
#include "device_names.hpp"
// After the names:
#include "cute_kernels/reduce/partial_range.hpp"

using namespace cute_kernels::schedule;

struct Case {
  int batch, heads, row_blocks, tokens, window, ctas, workers;
  bool variable_length;
};

constexpr int kRows = 8;

template <class Policy>
void check_schedule(Case const& c, std::vector<int> const& lengths, std::vector<int> const& window_lengths) {
  auto divisor = [](int x) { return cutlass::FastDivmod(x); };
  int const own_cost = Policy::work_tile_cost(c.variable_length);
  int const tiles_each = static_cast<int>(kv_tiles_of(c.tokens, c.window));
  Params params{};
  params.batch = c.batch, params.kv_heads = c.heads, params.rows = kRows * c.row_blocks - 3;
  params.tokens = c.tokens, params.window_tokens = c.window;
  params.variable_length = c.variable_length;
  params.tiles_per_work_tile = divisor(tiles_each);
  params.cost_per_work_tile = divisor(tiles_each + own_cost);
  params.work_tiles_per_row = divisor(c.heads * c.row_blocks), params.row_blocks = divisor(c.row_blocks);
  int const work_tiles = params.work_tiles();
  int const ctas = std::min(c.ctas, work_tiles * tiles_each);
  params.workers = std::min(c.workers, work_tiles * tiles_each / ctas);
  int const splits = ctas * params.workers;
  params.splits = divisor(splits);
  params.partition = make_partition(work_tiles * (tiles_each + own_cost), params.splits);
  params.longest_split = params.partition.longest();

  std::vector<int> shared(shared_bytes(c.variable_length, c.batch) / sizeof(int));
  int all_tiles = work_tiles * tiles_each;
  if (c.variable_length) {  // what prepare() leaves there
    params.lengths = lengths.data(), params.window_lengths = window_lengths.data();
    int* ends = shared.data() + sizeof(CtaSplits) / sizeof(int);
    for (int row = 0; row < c.batch; ++row)
      ends[row + 1] = ends[row] + static_cast<int>(kv_tiles_of(lengths[row], window_lengths[row]));
    auto& partition = *reinterpret_cast<Partition*>(ends + c.batch + 1);
    partition = make_partition((ends[c.batch] + own_cost * c.batch) * c.heads * c.row_blocks, params.splits);
    all_tiles = ends[c.batch] * c.heads * c.row_blocks;
  }
  Schedule<Policy> schedule(params, shared.data());

  std::vector<int> begins(splits + 1);
  for (int i = 0; i <= splits; ++i) begins[i] = schedule.split_begin(i);
  check(begins[0] == 0 && begins[splits] == all_tiles, "splits cover the schedule", begins[splits], all_tiles);
  for (int i = 0; i < splits; ++i) {
    int tiles = begins[i + 1] - begins[i];
    check(tiles >= 0 && (c.variable_length || tiles <= params.longest_split), "no split is longer than the longest",
          tiles, params.longest_split);
  }
  for (int index = 0; index < work_tiles; ++index) {
    WorkTile work_tile = schedule.work_tile(index);
    Range tiles = work_tile.tiles;
    int in_row = index % (c.heads * c.row_blocks), block = in_row % c.row_blocks;
    check(work_tile.index == index && work_tile.row == index / (c.heads * c.row_blocks) &&
              work_tile.kv_head == in_row / c.row_blocks,
          "the work tile of an index", index);
    check(work_tile.first_row == kRows * block && work_tile.rows == std::min(kRows, params.rows - kRows * block),
          "blocks of rows cover the rows", index);
    for (int tile : {tiles.begin, tiles.end - 1})
      check(schedule.work_tile_with(tile).index == index, "a KV tile's work tile", tile, index);
    int first = schedule.split_with(work_tile, tiles.begin), last = schedule.split_with(work_tile, tiles.end - 1);
    for (int i = 0; i < splits; ++i) {
      bool has_tiles = std::max(begins[i], tiles.begin) < std::min(begins[i + 1], tiles.end);
      bool found = first <= i && i <= last && schedule.stores_partial(i);
      check(has_tiles == found, "the splits that have KV tiles of a work tile", i, index, first, last);
    }
  }
}

// sparse_av, whose CTAs add up what their splits have of the work tile that they end in: the second kernel finds every
// split once, in its CTA's partial or by itself.
void check_sums_of_ctas(int heads, int tiles_each, int ctas, int workers) {
  Params params{};
  params.batch = 1, params.kv_heads = heads, params.rows = 1, params.workers = workers;
  params.tiles_per_work_tile = params.cost_per_work_tile = cutlass::FastDivmod(tiles_each);
  params.work_tiles_per_row = cutlass::FastDivmod(heads), params.row_blocks = cutlass::FastDivmod(1);
  params.splits = cutlass::FastDivmod(ctas * workers);
  params.partition = make_partition(heads * tiles_each, params.splits);
  Schedule<ProductPolicy<kRows>> schedule(params, nullptr);
  for (int index = 0; index < heads; ++index) {
    WorkTile work_tile = schedule.work_tile(index);
    std::vector<bool> has_partial(ctas);
    bool has_crossing = false;
    for (int split = 0; split < ctas * workers; ++split) {
      int begin = schedule.split_begin(split), end = schedule.split_begin(split + 1);
      if (std::max(begin, work_tile.tiles.begin) >= std::min(end, work_tile.tiles.end)) continue;
      if (end <= work_tile.tiles.end) {
        has_partial[split / workers] = true;
      } else {
        check(!has_crossing, "one split of a work tile ends in a later one", index);
        has_crossing = true;
      }
    }
    cute_kernels::reduce::PartialRange found(schedule, work_tile);
    found.to_ctas(schedule, work_tile, workers);
    check(found.crossing == has_crossing, "whether a split ends in a later work tile", index);
    for (int cta = 0; cta < ctas; ++cta)
      check(has_partial[cta] == (found.first <= cta && cta <= found.last), "the CTAs that have a partial", cta, index);
  }
}

// A work tile's first split, whose window makes it shorter, has all of the window.
void check_first_split(int tiles, int window, int lead) {
  check(lead == 0 || tiles >= window_tiles_of(window), "the first split has the window", tiles, window, lead);
  check(window > 0 || lead == 0, "without a window all splits are even", tiles, lead);
}

// Work tiles that are partitioned by themselves: every split is of one work tile.
template <class Policy>
void check_by_work_tile(int heads, int tiles_each, int splits, int window) {
  Params params{};
  params.batch = 1, params.kv_heads = heads, params.rows = 1, params.by_work_tile = true;
  params.window_tokens = window;
  params.tiles_per_work_tile = params.cost_per_work_tile = cutlass::FastDivmod(tiles_each);
  params.work_tiles_per_row = cutlass::FastDivmod(heads), params.row_blocks = cutlass::FastDivmod(1);
  params.splits = cutlass::FastDivmod(splits);
  int const lead = window_lead(window, tiles_each / splits), least = (tiles_each + lead) / splits;
  params.partition = make_partition(tiles_each, params.splits, lead);
  Schedule<Policy> schedule(params, nullptr);
  for (int split = 0; split < heads * splits; ++split) {
    int begin = schedule.split_begin(split), end = schedule.split_begin(split + 1);
    check(begin / tiles_each == split / splits && (end - 1) / tiles_each == split / splits,
          "splits end where work tiles do", split);
    if (split % splits == 0) {
      check(end - begin == least - lead, "and the first has fewer tiles", split, lead);
      check_first_split(end - begin, window, lead);
    } else {
      check(end - begin >= least && end - begin <= params.partition.longest(), "and are even", split);
    }
  }
}

// Likewise with lengths on the device, where every work tile has a partition of its own: its splits have all of its KV
// tiles, as evenly as can be but for the first one's lead, and are empty where there are none left.
void check_own_partitions(Case const& c, int splits, std::vector<int> const& lengths,
                          std::vector<int> const& window_lengths) {
  Params params{};
  params.batch = c.batch, params.kv_heads = c.heads, params.rows = kRows * c.row_blocks;
  params.tokens = c.tokens, params.window_tokens = c.window;
  params.variable_length = params.by_work_tile = true;
  params.lengths = lengths.data(), params.window_lengths = window_lengths.data();
  params.tiles_per_work_tile = cutlass::FastDivmod(static_cast<int>(kv_tiles_of(c.tokens, c.window)));
  params.work_tiles_per_row = cutlass::FastDivmod(c.heads * c.row_blocks);
  params.row_blocks = cutlass::FastDivmod(c.row_blocks);
  params.splits = cutlass::FastDivmod(splits);
  std::vector<int> shared(shared_bytes(true, c.batch) / sizeof(int));
  Schedule<AttentionPolicy<kRows, false>> schedule(params, shared.data());
  for (int index = 0; index < params.work_tiles(); ++index) {
    int row = index / (c.heads * c.row_blocks);
    int tiles = static_cast<int>(kv_tiles_of(lengths[row], window_lengths[row]));
    int lead = window_lead(window_lengths[row], tiles / splits), least = (tiles + lead) / splits;
    int begin = schedule.work_tile(index).tiles.begin, end = begin;
    for (int split = index * splits; split < (index + 1) * splits; ++split) {
      auto [range, own] = schedule.own_split(split);
      check(own.index == index && own.tiles.begin == begin && own.tokens == lengths[row], "a split's work tile", split);
      check(own.window_end() == begin + window_tiles_of(window_lengths[row]), "where its window ends", index);
      check(range.begin == end, "splits follow one another", split, range.begin, end);
      int count = range.end - range.begin;
      if (split == index * splits) {
        check(count == least - lead, "the first split has fewer tiles", split, count, tiles);
        check_first_split(count, window_lengths[row], lead);
      } else {
        check(count >= least && count <= (tiles + lead + splits - 1) / splits, "splits are even", split, count, tiles);
      }
      end = range.end;
    }
    check(end == begin + tiles, "splits have all tiles", index, end - begin, tiles);
  }
}

int main() {
  std::mt19937 random(std::random_device{}());
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 1000; ++i) {
    Case c{draw(1, 6),   draw(1, 4), draw(1, 3),     draw(0, 3000), draw(0, 3) ? draw(0, 140) : 0,
           draw(1, 132), draw(1, 8), draw(0, 1) == 1};
    std::vector<int> lengths(c.batch), window_lengths(c.batch);
    for (int& length : lengths) length = draw(0, c.tokens);
    for (int& length : window_lengths) length = draw(0, c.window);
    check_schedule<AttentionPolicy<kRows, false>>(c, lengths, window_lengths);
    check_own_partitions(c, draw(1, 64), lengths, window_lengths);
    c.variable_length = false;
    check_schedule<AttentionPolicy<kRows, true>>(c, {}, {});
    c.window = 0;
    check_schedule<ProductPolicy<kRows>>(c, {}, {});
    int heads = draw(1, 40), tiles_each = draw(1, 60), ctas = draw(1, std::min(132, heads * tiles_each));
    check_sums_of_ctas(heads, tiles_each, ctas, draw(1, std::min(16, heads * tiles_each / ctas)));
    int splits = draw(1, 40);
    check_by_work_tile<ProductPolicy<kRows>>(draw(1, 8), splits + draw(0, 100), splits, 0);
    check_by_work_tile<AttentionPolicy<kRows, true>>(draw(1, 8), splits + draw(0, 300), splits, draw(0, 140));
  }
  return report();
}
