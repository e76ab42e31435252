// choose_token_order: a permutation, streams no longer than without it.
#include "cute_kernels/format/token_order.hpp"

#include <algorithm>
#include <random>

#include "check.hpp"

using namespace cute_kernels::format;

template <int Classes>
void check_order(TokenCounts<Classes> const& counts, int number) {
  uint8_t order[kTileTokens], identity[kTileTokens];
  bool seen[kTileTokens] = {};
  for (int t = 0; t < kTileTokens; ++t) identity[t] = static_cast<uint8_t>(t);
  choose_token_order(counts, order);
  for (int t = 0; t < kTileTokens; ++t) {
    if (!check(order[t] < kTileTokens && !seen[order[t]], "a permutation", number, t)) return;
    seen[order[t]] = true;
  }
  for (int first = 0; first < Classes; first += kClasses) {
    int longest = 0;
    for (int g = 0; g < kTokenGroups; ++g)
      for (int c = first; c < first + kClasses; ++c) {
        int sum = 0;
        for (int t = 0; t < kTileTokens; ++t) sum += t % kTokenGroups == g ? counts.count[order[t]][c] : 0;
        longest = std::max(longest, sum);
      }
    check(longest_stream(counts, order, first) == longest, "longest_stream", number, first);
  }
  if (Classes == kClasses)
    check(longest_stream(counts, order) <= longest_stream(counts, identity), "balanced better than by chance", number);
}

template <int Classes>
void check_orders(std::mt19937& random) {
  for (int number = 0; number < 50; ++number) {
    TokenCounts<Classes> counts = {};
    int most = 1 + static_cast<int>(random() % 32);  // 0 .. 32 nonzeros of a class
    if (number)
      for (auto& token : counts.count)
        for (uint8_t& count : token) count = static_cast<uint8_t>(random() % (most + 1));
    check_order(counts, number);
  }
}

int main() {
  std::mt19937 random(1);
  check_orders<kClasses>(random);
  check_orders<2 * kClasses>(random);
  return report();
}
