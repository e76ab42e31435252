// The way of a tile's logits through shared memory, from a warpgroup's accumulators to rows: every logit arrives, and
// reads are without bank conflicts.
#include "cute_kernels/ops/qk/warpgroup/logits_layout.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "cute_kernels/format/tile/tile.hpp"

using namespace cute_kernels;
using namespace cute_kernels::qk;

constexpr int kTokens = format::kTileTokens;
constexpr int kBankUnits = 8;  // 32 banks of 4 bytes

// Wavefronts of eight accesses of a unit each.
template <class UnitOf>
int wavefronts(UnitOf unit_of) {
  int load[kBankUnits] = {};
  for (int i = 0; i < kBankUnits; ++i) ++load[unit_of(i) % kBankUnits];
  return *std::max_element(load, load + kBankUnits);
}

template <int kN>
void check_units() {
  std::vector<int> seen(kLogitsUnits<kN>);
  for (int token = 0; token < kTokens; ++token)
    for (int unit = 0; unit < kN / kUnitRows; ++unit) {
      int at = logits_unit<kN>(token, unit);
      if (check(at >= 0 && at < kLogitsUnits<kN>, "units are inside", token, unit)) ++seen[at];
      for (int step = 0; step < kN / kUnitRows; ++step)
        check(logits_unit<kN>(token, unit ^ step) == (at ^ step), "units step by exclusive or", token, unit, step);
      if (token < kReadTokens)
        check(logits_unit<kN>(token + kReadTokens, unit) == at + logits_unit<kN>(kReadTokens, 0), "tokens step by 32",
              token, unit);
    }
  check(std::count(seen.begin(), seen.end(), 1) == kLogitsUnits<kN>, "every unit has a place of its own");
  for (int unit = 0; unit < kN / kUnitRows; ++unit)
    for (int token = 0; token < kTokens; token += 8)
      check(wavefronts([&](int i) { return logits_unit<kN>(token + i, unit); }) == 1, "tokens that follow", token,
            unit);
}

// Put as stmatrix does, under a random order of tokens, read as ldmatrix does. A logit is token * kN + row.
template <int kN, int kVector>
void check_exchange(std::mt19937& random) {
  int order[kTokens];
  std::iota(order, order + kTokens, 0);
  std::shuffle(order, order + kTokens, random);
  std::vector<int> shared(kLogitsUnits<kN> * kUnitRows, -1);
  double written = 0;
  for (int unit = 0; unit < kN / kUnitRows; ++unit)
    for (int first = 0; first < kTokens; first += kMatrixTokens) {
      auto at = [&](int i) { return logits_unit<kN>(order[first + i], unit); };
      written += wavefronts(at);
      for (int i = 0; i < kMatrixTokens; ++i)
        for (int j = 0; j < kUnitRows; ++j)
          shared[at(i) * kUnitRows + j] = order[first + i] * kN + unit * kUnitRows + j;
    }
  check(written / (kN / kUnitRows * kTokens / kMatrixTokens) < 4, "wavefronts of a random order");

  for (int unit = 0; unit < kN / kUnitRows; ++unit)
    for (int first = 0; first < kTokens; first += kReadTokens) {
      int logits[format::kLanes][kReadTokens / 4];  // registers of two
      for (int matrix = 0; matrix < 4; ++matrix) {
        auto at = [&](int row) { return logits_unit<kN>(first + token_of_matrix_row<kVector>(matrix, row), unit); };
        check(wavefronts(at) == 1, "a matrix that is read", unit, first, matrix);
        for (int lane = 0; lane < format::kLanes; ++lane)
          for (int i = 0; i < 2; ++i)
            logits[lane][2 * matrix + i] = shared[at(2 * (lane % 4) + i) * kUnitRows + lane / 4];
      }
      for (int lane = 0; lane < format::kLanes; ++lane)
        for (int i = 0; i < kReadTokens / 4; ++i) {
          int token = first + kVector * (lane % 4 + 4 * (i / kVector)) + i % kVector;
          check(logits[lane][i] == token * kN + unit * kUnitRows + lane / 4, "vectors of a row", lane, i, unit, first);
        }
    }
}

int main() {
  std::mt19937 random(std::random_device{}());
  check_units<32>(), check_units<64>();
  for (int i = 0; i < 20; ++i) {
    check_exchange<32, 4>(random), check_exchange<32, 8>(random);
    check_exchange<64, 4>(random), check_exchange<64, 8>(random);
  }
  return report();
}
