// The kernels of kernels.hpp for any CPU.
#include "cute_kernels/cpu/kernels.hpp"
#include "cute_kernels/cpu/simd_scalar.hpp"
#include "cute_kernels/cpu/tile_kernels.hpp"

namespace cute_kernels::cpu {

Kernels const* scalar_kernels() {
  static constexpr Kernels made = make_kernels<Scalar>();
  return &made;
}

}  // namespace cute_kernels::cpu
