// The order of tokens inside a tile, chosen so that the value streams come out equally long.
//
// A token adds its count of nonzeros in each of 8 channel classes to the 8 streams of its token group. 64 tokens are to
// be split over 8 groups of 8 such that the longest of the 64 (group, class) streams is short: first greedily, the most
// unusual token first, then by the swap of two tokens that shortens the two groups concerned most, up to kTokenSwaps
// times. Integers and fixed tie rules only: every implementation gives the same order, bit for bit.
#pragma once

#include <cstdint>

#include "cute_kernels/format/tile.hpp"

namespace cute_kernels::format {

inline constexpr int kTokenGroups = 8;
inline constexpr int kGroupTokens = kTileTokens / kTokenGroups;
inline constexpr int kTokenSwaps = 8;
inline constexpr int kBalanceScale = 8;  // deviations from the tile's mean are kept in eighths of a count

// One cache's counts, or a K/V pair's (then 16 classes, so that both share one order).
template <int Classes>
struct TokenCounts {
  uint8_t count[kTileTokens][Classes];
};

// counts -> order: token_position -> token, positions of group g being g, g + 8, ..., in increasing order of token.
// Returns nothing else: a stream's length is the sum of the counts of its group, see `longest_stream`.
template <int Classes>
inline void choose_token_order(TokenCounts<Classes> const& counts, uint8_t order[kTileTokens]) {
  int deviation[kTileTokens][Classes], unusual[kTileTokens], by_unusual[kTileTokens];
  for (int t = 0; t < kTileTokens; ++t) unusual[t] = 0;
  for (int c = 0; c < Classes; ++c) {
    int sum = 0;
    for (int t = 0; t < kTileTokens; ++t) sum += counts.count[t][c];
    int mean = (sum * kBalanceScale + kTileTokens / 2) / kTileTokens;
    for (int t = 0; t < kTileTokens; ++t) {
      deviation[t][c] = kBalanceScale * counts.count[t][c] - mean;
      unusual[t] += deviation[t][c] * deviation[t][c];
    }
  }
  for (int t = 0; t < kTileTokens; ++t) {  // rank: larger first, ties by lower token
    int rank = 0;
    for (int u = 0; u < kTileTokens; ++u) rank += unusual[u] > unusual[t] || (unusual[u] == unusual[t] && u < t);
    by_unusual[rank] = t;
  }

  int group[kTileTokens], members[kTokenGroups] = {}, drift[kTokenGroups][Classes] = {},
                          load[kTokenGroups][Classes] = {};
  for (int i = 0; i < kTileTokens; ++i) {
    int t = by_unusual[i], best = -1, best_cost = 0;
    for (int g = 0; g < kTokenGroups; ++g) {
      if (members[g] == kGroupTokens) continue;
      int cost = 0;
      for (int c = 0; c < Classes; ++c) {
        int d = drift[g][c] + deviation[t][c];
        cost += d * d;
      }
      if (best < 0 || cost < best_cost) best = g, best_cost = cost;
    }
    group[t] = best;
    ++members[best];
    for (int c = 0; c < Classes; ++c) drift[best][c] += deviation[t][c], load[best][c] += counts.count[t][c];
  }

  for (int swap = 0; swap < kTokenSwaps; ++swap) {
    int longest = -1, from = 0;  // the group of the longest stream; ties: lower group
    for (int g = 0; g < kTokenGroups; ++g)
      for (int c = 0; c < Classes; ++c)
        if (load[g][c] > longest) longest = load[g][c], from = g;
    int best = longest, best_x = -1, best_y = -1;  // ties: lower x, then lower y
    for (int x = 0; x < kTileTokens; ++x) {
      if (group[x] != from) continue;
      for (int y = 0; y < kTileTokens; ++y) {
        int to = group[y], worst = 0;
        if (to == from) continue;
        for (int c = 0; c < Classes; ++c) {
          int d = counts.count[x][c] - counts.count[y][c];
          int a = load[from][c] - d, b = load[to][c] + d;
          worst = a > worst ? a : worst;
          worst = b > worst ? b : worst;
        }
        if (worst < best) best = worst, best_x = x, best_y = y;
      }
    }
    if (best_x < 0) break;
    int to = group[best_y];
    for (int c = 0; c < Classes; ++c) {
      int d = counts.count[best_x][c] - counts.count[best_y][c];
      load[from][c] -= d;
      load[to][c] += d;
    }
    group[best_x] = to;
    group[best_y] = from;
  }

  int filled[kTokenGroups] = {};
  for (int t = 0; t < kTileTokens; ++t) order[group[t] + kTokenGroups * filled[group[t]]++] = static_cast<uint8_t>(t);
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
