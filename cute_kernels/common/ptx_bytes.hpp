// Inline PTX as in ptx.hpp, for codes of a byte.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

namespace cute_kernels::ptx {

// As load_shared_u16_if.
CUTE_DEVICE void load_shared_u8_if(uint32_t& value, uint32_t address, uint32_t word, uint32_t bits) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b32 t;\n"
      "and.b32 t, %2, %3;\n"
      "setp.ne.u32 p, t, 0;\n"
      "@p ld.shared.u8 %0, [%1];\n"
      "}"
      : "+r"(value)
      : "r"(address), "r"(word), "r"(bits));
}

// Four, as floats_to_e4m3, the first in the lowest byte.
CUTE_DEVICE uint32_t floats_to_four_e4m3(float const (&x)[4]) {
  uint32_t codes;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(codes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return codes;
}

}  // namespace cute_kernels::ptx
