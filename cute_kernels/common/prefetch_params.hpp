// Parameters of a kernel lie in constant memory, a line of which is fetched when it is first used. Code that uses them one
// after the other waits for a line at a time; here every warp asks for one.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

namespace cute_kernels {

// In shared memory, a word of every warp: a load that nothing uses would not be made.
struct PrefetchedParams {
  uint32_t of_warp[32];
};

// params: the kernel's own parameter, declared CUTE_GRID_CONSTANT. With all threads of a CTA.
template <class Params>
CUTE_DEVICE void prefetch_params(Params const& params, PrefetchedParams& to) {
  constexpr int kLineWords = 16, kWords = sizeof(Params) / sizeof(uint32_t);
  int warp = static_cast<int>(threadIdx.x) / 32, word = warp * kLineWords;
  if (word >= kWords + kLineWords) return;  // lines need not begin where the parameter does
  uint32_t const* words = reinterpret_cast<uint32_t const*>(&params);
  *const_cast<uint32_t volatile*>(&to.of_warp[warp]) = words[word < kWords ? word : kWords - 1];
}

}  // namespace cute_kernels
