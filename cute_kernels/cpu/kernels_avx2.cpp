// The kernels of kernels.hpp, compiled for AVX2.
#include "cute_kernels/cpu/kernels.hpp"

#if defined(__x86_64__)

#include "cute_kernels/cpu/simd_avx2.hpp"
#include "cute_kernels/cpu/tile_kernels.hpp"

namespace cute_kernels::cpu {

Kernels const* avx2_kernels() {
  static constexpr Kernels made = make_kernels<Avx2>();
  return &made;
}

}  // namespace cute_kernels::cpu

#else

cute_kernels::cpu::Kernels const* cute_kernels::cpu::avx2_kernels() { return nullptr; }

#endif
