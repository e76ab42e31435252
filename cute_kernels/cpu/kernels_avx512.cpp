// The kernels of kernels.hpp, compiled for AVX-512.
#include "cute_kernels/cpu/kernels.hpp"

#if defined(__x86_64__)

#if defined(__GNUC__) && !defined(__clang__)  // GCC's own intrinsics start from undefined vectors and warn about it
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "cute_kernels/cpu/simd_avx512.hpp"
#include "cute_kernels/cpu/tile_kernels.hpp"

namespace cute_kernels::cpu {

Kernels const* avx512_kernels() {
  static constexpr Kernels made = make_kernels<Avx512>();
  return &made;
}

}  // namespace cute_kernels::cpu

#else

cute_kernels::cpu::Kernels const* cute_kernels::cpu::avx512_kernels() { return nullptr; }

#endif
