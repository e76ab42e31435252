// The order of tokens inside a tile of the format of at most two of four, chosen so that the value streams come out
// about equally long.
//
// Four tokens that are a group of values stay neighbours. So there are two choices, which do not meet: which group of
// four tokens has which place, from which follows the column of A, and so the lane, that its values have; and the order
// of a group's four tokens, from which follows the row of A that their keys have. Each is a local search in rounds, as
// in token_order.hpp: places are paired, and every pair makes the one swap that evens their loads out most. The pairs of
// a round and the candidates of a pair are independent of each other. Integers and fixed tie rules only.
#pragma once

#include <cstdint>

#include "cute_kernels/format/tile/two_of_four_bitmap.hpp"

namespace cute_kernels::format {

inline constexpr int kFour = TwoOfFourGroups::kGroup, kTileGroups = kTileTokens / kFour;  // neighbouring tokens
inline constexpr int kGroupRounds = 2;                                                    // of all pairs

// Classes along K, and so lanes and streams of a row of A, that groups are dealt to in turn: 8 of two streams a lane.
CUTE_HOST_DEVICE constexpr int slot_classes(int streams) { return 4 * streams; }

// Values kept of a tile. Groups of four channels of keys have classes; channels of values have the class of their position
// mod 8, which is a row of A.
struct SlotCounts {
  uint8_t keys[kTileTokens][kClasses];    // by token and class of its group of channels
  uint8_t values[kTileGroups][kClasses];  // by group of tokens and class of channel
};

// What half of the sum of squared loads grows by if x leaves a's place for b's, and y b's for a's.
CUTE_HOST_DEVICE constexpr int change_of_swap(uint8_t const* x, uint8_t const* y, int const* load_a,
                                              int const* load_b) {
  int change = 0;
  for (int c = 0; c < kClasses; ++c) {
    int d = x[c] - y[c];
    change += d * (d - (load_a[c] - load_b[c]));
  }
  return change;
}

CUTE_HOST_DEVICE constexpr void move_load(uint8_t const* x, uint8_t const* y, int* load_a, int* load_b) {
  for (int c = 0; c < kClasses; ++c) {
    int d = x[c] - y[c];
    load_a[c] -= d, load_b[c] += d;
  }
}

// group_at: place -> group. A class has places that are alike mod `classes`.
inline void choose_group_places(SlotCounts const& counts, int classes, uint8_t group_at[kTileGroups]) {
  int load[kClasses][kClasses] = {};
  for (int q = 0; q < kTileGroups; ++q)
    for (int c = 0; c < kClasses; ++c) load[q % classes][c] += counts.values[group_at[q]][c];
  for (int round = 0; round < kGroupRounds * (classes - 1); ++round)
    for (int a = 0; a < classes; ++a) {
      int const b = a ^ (round % (classes - 1) + 1);
      if (b < a) continue;
      int best = 0, best_x = -1, best_y = -1;  // ties: lower x, then lower y
      for (int x = a; x < kTileGroups; x += classes)
        for (int y = b; y < kTileGroups; y += classes) {
          int const change = change_of_swap(counts.values[group_at[x]], counts.values[group_at[y]], load[a], load[b]);
          if (change < best) best = change, best_x = x, best_y = y;
        }
      if (best_x < 0) continue;
      uint8_t const x = group_at[best_x], y = group_at[best_y];
      move_load(counts.values[x], counts.values[y], load[a], load[b]);
      group_at[best_x] = y, group_at[best_y] = x;
    }
}

// order: token_position -> token, whose groups have their places. Token i of the group at place q has row 4 (q mod 2) + i of
// every 8 of A.
inline void choose_tokens_of_groups(SlotCounts const& counts, uint8_t order[kTileTokens]) {
  constexpr int kHalves = kClasses / kFour;
  int load[kClasses][kClasses] = {};
  for (int p = 0; p < kTileTokens; ++p)
    for (int c = 0; c < kClasses; ++c) load[p % kClasses][c] += counts.keys[order[p]][c];
  for (int round = 0; round < kGroupRounds * (kFour - 1); ++round)
    for (int a = 0; a < kClasses; ++a) {
      int const b = a ^ (round % (kFour - 1) + 1);
      if (b < a) continue;
      int best = 0, best_q = -1;  // ties: lower place
      for (int q = a / kFour; q < kTileGroups; q += kHalves) {
        uint8_t const* of_group = order + kFour * q;
        int const change =
            change_of_swap(counts.keys[of_group[a % kFour]], counts.keys[of_group[b % kFour]], load[a], load[b]);
        if (change < best) best = change, best_q = q;
      }
      if (best_q < 0) continue;
      uint8_t& x = order[kFour * best_q + a % kFour];
      uint8_t& y = order[kFour * best_q + b % kFour];
      move_load(counts.keys[x], counts.keys[y], load[a], load[b]);
      uint8_t const token = x;
      x = y, y = token;
    }
}

// Of keys, or values, or both that share an order; the streams of a lane, 0 where there are none of these.
inline void choose_group_order(SlotCounts const& counts, int key_streams, int value_streams,
                               uint8_t order[kTileTokens]) {
  uint8_t group_at[kTileGroups] = {};
  for (int q = 0; q < kTileGroups; ++q) group_at[q] = static_cast<uint8_t>(q);
  if (value_streams) choose_group_places(counts, slot_classes(value_streams), group_at);
  for (int p = 0; p < kTileTokens; ++p) order[p] = static_cast<uint8_t>(kFour * group_at[p / kFour] + p % kFour);
  if (key_streams) choose_tokens_of_groups(counts, order);
}

// The longest streams under an order.
inline int longest_key_slots(SlotCounts const& counts, uint8_t const order[kTileTokens]) {
  int longest = 0;
  for (int row = 0; row < kClasses; ++row)
    for (int c = 0; c < kClasses; ++c) {
      int load = 0;
      for (int p = row; p < kTileTokens; p += kClasses) load += counts.keys[order[p]][c];
      longest = load > longest ? load : longest;
    }
  return longest;
}
inline int longest_value_slots(SlotCounts const& counts, int streams, uint8_t const order[kTileTokens]) {
  int longest = 0, classes = slot_classes(streams);
  for (int column = 0; column < classes; ++column)
    for (int c = 0; c < kClasses; ++c) {
      int load = 0;
      for (int q = column; q < kTileGroups; q += classes) load += counts.values[order[kFour * q] / kFour][c];
      longest = load > longest ? load : longest;
    }
  return longest;
}

}  // namespace cute_kernels::format
