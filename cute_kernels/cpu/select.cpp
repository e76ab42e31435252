// Which elements are kept: independent for every token.
#include <mutex>
#include <vector>

#include "cute_kernels/cpu/cpu.hpp"
#include "cute_kernels/cpu/kernels.hpp"
#include "cute_kernels/cpu/parallel.hpp"

namespace cute_kernels::cpu {
namespace {

constexpr int64_t kTokensPerTask = 512;

}  // namespace

void select(DenseView const& x, int keep, uint32_t* masks, int32_t* counts, uint16_t* pruned, int threads) {
  Kernels const& isa = kernels();
  int const padded = format::padded_head_dim(x.head_dim), words = padded / 32;
  int64_t const heads = int64_t{x.batch} * x.kv_heads;
  int64_t const tasks_per_head = (x.tokens + kTokensPerTask - 1) / kTokensPerTask;
  std::mutex counts_mutex;
  if (counts) std::fill_n(counts, heads * padded, 0);

  parallel(threads, heads * tasks_per_head, [&](TaskQueue& queue) {
    std::vector<uint32_t> unused_mask(words);
    std::vector<int32_t> task_counts(padded);
    for (int64_t task; (task = queue.next()) >= 0;) {
      int64_t const head = task / tasks_per_head, first = task % tasks_per_head * kTokensPerTask;
      int64_t const last = std::min(first + kTokensPerTask, x.tokens);
      std::fill(task_counts.begin(), task_counts.end(), 0);
      for (int64_t token = first; token < last; ++token) {
        int64_t const row = head * x.tokens + token;
        isa.select_row(x.row(head, token), x.head_dim, padded, x.dtype == DType::kBFloat16, keep,
                       masks ? masks + row * words : unused_mask.data(), counts ? task_counts.data() : nullptr,
                       pruned ? pruned + row * x.head_dim : nullptr);
      }
      if (!counts) continue;
      std::lock_guard<std::mutex> lock(counts_mutex);
      for (int c = 0; c < padded; ++c) counts[head * padded + c] += task_counts[c];
    }
  });
}

}  // namespace cute_kernels::cpu
