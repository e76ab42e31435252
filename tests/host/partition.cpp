// How work is partitioned: splits cover all of it once, and are as even as can be but for the first one's lead.
#include "cute_kernels/schedule/partition.hpp"

#include <random>

#include "check.hpp"

using namespace cute_kernels::schedule;

void check_partition(int all, int splits, int lead) {
  cutlass::FastDivmod divisor(splits);
  Partition partition = make_partition(all, divisor, lead);
  int least = (all + lead) / splits;
  check(partition.begin(0, divisor) == 0 && partition.begin(splits, divisor) == all, "splits cover all", all, splits);
  for (int i = 0; i < splits; ++i) {
    int length = partition.begin(i + 1, divisor) - partition.begin(i, divisor);
    if (i == 0)
      check(length == least - lead, "the first split has its lead less, and is not longer than others", all, splits,
            lead);
    else
      check(length >= least && length <= partition.longest(), "splits differ by one", all, splits, i);
  }
}

int main() {
  std::mt19937 random(std::random_device{}());
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 1000; ++i) {
    int all = draw(0, 2000), splits = draw(1, 1100);
    check_partition(all, splits, 0);
    check_partition(all, splits, draw(0, all / splits));
  }
  return report();
}
