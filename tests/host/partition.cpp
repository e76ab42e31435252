// How work is partitioned: splits cover all of it once, and are as even as can be.
#include "cute_kernels/schedule/partition.hpp"

#include <random>

#include "check.hpp"

using namespace cute_kernels::schedule;

Partition make(int total, int splits) { return make_partition(total, cutlass::FastDivmod(splits)); }

void check_partition(int all, int splits) {
  Partition partition = make(all, splits);
  cutlass::FastDivmod divisor(splits);
  check(partition.begin(0, divisor) == 0 && partition.begin(splits, divisor) == all, "splits cover all", all, splits);
  for (int i = 0; i < splits; ++i) {
    int length = partition.begin(i + 1, divisor) - partition.begin(i, divisor);
    check(length >= all / splits && length <= partition.longest(), "splits differ by one", all, splits, i);
    if (i == 0) check(length == all / splits, "the first split is not longer than others", all, splits);
  }
}

int main() {
  std::mt19937 random(std::random_device{}());
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 1000; ++i) check_partition(draw(0, 2000), draw(1, 1100));
  return report();
}
