// The order of tokens in tiles of at most two of four: fours stay together, loads are what the order makes of the counts,
// and streams come out shorter than in the order of memory.
#include "cute_kernels/format/group_order.hpp"

#include <algorithm>
#include <random>

#include "check.hpp"

using namespace cute_kernels::format;

int main() {
  std::mt19937 random(1);
  long long before[2] = {}, after[2] = {};
  for (int round = 0; round < 200; ++round) {
    int streams = 1 + round % 2, classes = slot_classes(streams);
    SlotCounts counts{};
    for (auto& token : counts.keys)
      for (int c = 0; c < classes; ++c) token[c] = static_cast<uint8_t>(random() % 17);
    for (auto& group : counts.values)
      for (auto& of_class : group) of_class = static_cast<uint8_t>(random() % 33);
    uint8_t memory[kTileTokens], order[kTileTokens];
    for (int p = 0; p < kTileTokens; ++p) memory[p] = static_cast<uint8_t>(p);
    choose_group_order(counts, streams, streams, order);
    bool seen[kTileTokens] = {};
    for (int p = 0; p < kTileTokens; ++p) {
      check(!seen[order[p]], "every token has one place", round, p);
      seen[order[p]] = true;
      check(order[p] / kFour == order[p / kFour * kFour] / kFour, "fours stay together", round, p);
    }
    int most = 0;  // a lane of keys has a row of every 8, a lane of values a class of places of every `classes`
    for (int lane = 0; lane < kClasses * kClasses; ++lane) {
      int load = 0;
      for (int p = lane / kClasses; p < kTileTokens; p += kClasses) load += counts.keys[order[p]][lane % kClasses];
      most = std::max(most, load);
    }
    check(longest_key_slots(counts, order) == most, "the longest stream of keys", round);
    before[0] += longest_key_slots(counts, memory), after[0] += longest_key_slots(counts, order);
    before[1] += longest_value_slots(counts, streams, memory);
    after[1] += longest_value_slots(counts, streams, order);
    uint8_t keys_alone[kTileTokens];
    choose_group_order(counts, streams, 0, keys_alone);
    for (int p = 0; p < kTileTokens; ++p)
      check(keys_alone[p] / kFour == p / kFour, "keys alone leave fours where they are", round, p);
  }
  for (int i : {0, 1}) check(after[i] < before[i] * 0.97, "shorter than in memory", i, int(before[i]), int(after[i]));
  return report();
}
