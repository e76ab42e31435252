// The order of tokens inside a tile, chosen so that the value streams come out equally long.
//
// A token adds its count of nonzeros in each of 8 channel classes to the 8 streams of its token group. 64 tokens are to
// be split over 8 groups of 8 such that the longest of the 64 (group, class) streams is short. A local search in
// rounds: in each round the groups are paired, every group with another one, and a pair makes the one swap of two
// tokens that evens their loads out most. The pairs of a round, and the candidate swaps of a pair, are independent of
// each other and run in parallel on a GPU. Integers and fixed tie rules only: every implementation gives the same
// order, bit for bit. Lengths are in values; how many rows a stream then takes is up to the codec.
#pragma once

#include <cstdint>

#include "cute_kernels/format/tile/tile.hpp"

namespace cute_kernels::format {

inline constexpr int kTokenGroups = 8;
inline constexpr int kGroupTokens = kTileTokens / kTokenGroups;
inline constexpr int kLargestScale = 4;

// All pairs of groups twice for one cache, four times for a K/V pair, which takes longer to settle.
CUTE_HOST_DEVICE constexpr int token_rounds(int caches) { return 2 * caches * (kTokenGroups - 1); }

// In round r the groups whose numbers differ by this pattern of bits are paired.
CUTE_HOST_DEVICE constexpr int round_pattern(int round) { return round % (kTokenGroups - 1) + 1; }

// Counts are scaled before their squares are compared: the fullest classes of a cache's tile decide how long it gets,
// and a class whose streams are some values shorter may be a little uneven. `sum` and `most`: of the class and of the
// cache's fullest class in this tile. With two caches there is less freedom to even the fullest classes out alone.
CUTE_HOST_DEVICE constexpr int class_scale(int sum, int most, int caches) {
  int values_below = (most - sum + kTokenGroups / 2) / kTokenGroups / caches;
  return values_below < kLargestScale - 1 ? kLargestScale - values_below : 1;
}

// One cache's counts, or a K/V pair's (then 16 classes, so that both share one order).
template <int Classes>
struct TokenCounts {
  uint8_t count[kTileTokens][Classes];
};

// counts -> order: token_position -> token. Member i of group g is at position g + 8 i.
// Returns nothing else: a stream's length is the sum of the counts of its group, see `longest_stream`.
template <int Classes>
inline void choose_token_order(TokenCounts<Classes> const& counts, uint8_t order[kTileTokens]) {
  static_assert(Classes % kClasses == 0, "classes come in caches");
  constexpr int kCaches = Classes / kClasses;
  int scale[Classes];
  for (int first = 0; first < Classes; first += kClasses) {
    int sum[kClasses] = {}, most = 0;
    for (int c = 0; c < kClasses; ++c) {
      for (int t = 0; t < kTileTokens; ++t) sum[c] += counts.count[t][first + c];
      most = sum[c] > most ? sum[c] : most;
    }
    for (int c = 0; c < kClasses; ++c) scale[first + c] = class_scale(sum[c], most, kCaches);
  }

  int scaled[kTileTokens][Classes], load[kTokenGroups][Classes] = {};  // scaled: by position
  for (int p = 0; p < kTileTokens; ++p) {
    order[p] = static_cast<uint8_t>(p);
    for (int c = 0; c < Classes; ++c) {
      scaled[p][c] = scale[c] * counts.count[p][c];
      load[p % kTokenGroups][c] += scaled[p][c];
    }
  }

  for (int round = 0; round < token_rounds(kCaches); ++round) {
    for (int a = 0; a < kTokenGroups; ++a) {
      int b = a ^ round_pattern(round);
      if (b < a) continue;
      int best = 0, best_x = -1, best_y = -1;  // ties: lower x, then lower y
      for (int x = a; x < kTileTokens; x += kTokenGroups) {
        for (int y = b; y < kTileTokens; y += kTokenGroups) {
          int change = 0;  // half of what the sum of the squared loads of a and b grows by
          for (int c = 0; c < Classes; ++c) {
            int d = scaled[x][c] - scaled[y][c];
            change += d * (d - (load[a][c] - load[b][c]));
          }
          if (change < best) best = change, best_x = x, best_y = y;
        }
      }
      if (best_x < 0) continue;
      uint8_t token = order[best_x];
      order[best_x] = order[best_y];
      order[best_y] = token;
      for (int c = 0; c < Classes; ++c) {
        int x = scaled[best_x][c], y = scaled[best_y][c];
        load[a][c] += y - x;
        load[b][c] += x - y;
        scaled[best_x][c] = y;
        scaled[best_y][c] = x;
      }
    }
  }
}

// A pair of tiles may be a little too long for its slot. Then one swap after the other is made against that: of the
// group with the stream that is the most values above its cache's bound (ties: the lowest group) a token goes to
// another group, such that the sum of squared excesses gets least (ties: lower x, then lower y). Ends when all streams
// fit, when no swap helps, or after kFitSwaps.
inline constexpr int kFitSwaps = 16;

CUTE_HOST_DEVICE constexpr int squared_excess(int length, int bound) {
  return length > bound ? (length - bound) * (length - bound) : 0;
}

// bound: of each cache's streams.
template <int Classes>
inline void fit_token_order(TokenCounts<Classes> const& counts, int const* bound, uint8_t order[kTileTokens]) {
  int load[kTokenGroups][Classes] = {};
  for (int p = 0; p < kTileTokens; ++p)
    for (int c = 0; c < Classes; ++c) load[p % kTokenGroups][c] += counts.count[order[p]][c];
  for (int swaps = 0; swaps < kFitSwaps; ++swaps) {
    int a = -1, most = 0;
    for (int g = 0; g < kTokenGroups; ++g)
      for (int c = 0; c < Classes; ++c) {
        int excess = load[g][c] - bound[c / kClasses];
        if (excess > most) most = excess, a = g;
      }
    if (a < 0) return;
    int best = 0, best_x = -1, best_y = -1;
    for (int x = a; x < kTileTokens; x += kTokenGroups) {
      for (int y = 0; y < kTileTokens; ++y) {
        int b = y % kTokenGroups, change = 0;
        if (b == a) continue;
        for (int c = 0; c < Classes; ++c) {
          int d = counts.count[order[y]][c] - counts.count[order[x]][c], most_values = bound[c / kClasses];
          change += squared_excess(load[a][c] + d, most_values) - squared_excess(load[a][c], most_values) +
                    squared_excess(load[b][c] - d, most_values) - squared_excess(load[b][c], most_values);
        }
        if (change < best) best = change, best_x = x, best_y = y;
      }
    }
    if (best_x < 0) return;
    int b = best_y % kTokenGroups;
    for (int c = 0; c < Classes; ++c) {
      int d = counts.count[order[best_y]][c] - counts.count[order[best_x]][c];
      load[a][c] += d;
      load[b][c] -= d;
    }
    uint8_t token = order[best_x];
    order[best_x] = order[best_y];
    order[best_y] = token;
  }
}

// The longest stream of classes [first, first + kClasses) under an order.
template <int Classes>
inline int longest_stream(TokenCounts<Classes> const& counts, uint8_t const order[kTileTokens], int first = 0) {
  int longest = 0;
  for (int g = 0; g < kTokenGroups; ++g)
    for (int c = first; c < first + kClasses; ++c) {
      int load = 0;
      for (int i = 0; i < kGroupTokens; ++i) load += counts.count[order[g + kTokenGroups * i]][c];
      longest = load > longest ? load : longest;
    }
  return longest;
}

}  // namespace cute_kernels::format
