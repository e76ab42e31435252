// In place of cute_kernels/common/ptx.hpp.
#pragma once

#include <cute/config.hpp>

#include "emulated_cta.hpp"

namespace cute_kernels::ptx {

inline void compiler_fence() {}

inline void named_barrier_arrive(int barrier, int threads) {
  std::unique_lock lock(emulated::mutex);
  emulated::named[barrier].arrive(32 / emulated::warp->lanes, threads);
}
inline void named_barrier_sync(int barrier, int threads) {
  std::unique_lock lock(emulated::mutex);
  auto& named = emulated::named[barrier];
  int phase = named.phase;
  named.arrive(32 / emulated::warp->lanes, threads);
  emulated::wait_until(lock, "a named barrier", [&] { return named.phase != phase; });
}
bool named_barrier_any(int barrier, int threads, bool holds);  // not emulated

}  // namespace cute_kernels::ptx
