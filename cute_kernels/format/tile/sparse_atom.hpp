// The sparse tensor-core instruction as a CuTe atom: mma.sp.m16n8k32, of CC 8.0 and newer, for fp16 and bf16.
//
// A is 16 x 32, but of every group of 4 neighbours along K only two values are stored, so a lane holds 8 values in 4
// registers: a register is a group's two values, in order. Metadata says which two of the four: 4 bits a group, the index
// of the first in the lower two, that of the second, which is larger, in the upper two.
#pragma once

#include <cstdint>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/tensor.hpp>

namespace cute_kernels::format {

template <class Element>
struct SparseMma_16x8x32 {
  using DRegisters = float[4];
  using ARegisters = uint32_t[4];
  using BRegisters = uint32_t[4];
  using CRegisters = float[4];
  using ERegisters = uint32_t[1];

  // d = a b + d. A word of metadata serves two atoms, see ELayout; kAtom: which of them this is.
  template <int kAtom>
  CUTE_DEVICE static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                              uint32_t a3, uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3, uint32_t e) {
#if defined(__CUDA_ARCH__)
    static_assert(kAtom == 0 || kAtom == 1);
    if constexpr (cute::is_same_v<Element, cute::half_t>)
      asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
          : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(b2), "r"(b3), "r"(e), "n"(kAtom));
    else
      asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
          : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(b2), "r"(b3), "r"(e), "n"(kAtom));
#endif
  }
};

}  // namespace cute_kernels::format

namespace cute {

template <class Element>
struct MMA_Traits<cute_kernels::format::SparseMma_16x8x32<Element>> {
  using ValTypeD = float;
  using ValTypeA = Element;
  using ValTypeB = Element;
  using ValTypeC = float;

  using Shape_MNK = Shape<_16, _8, _32>;
  using ThrID = Layout<_32>;
  // (lane, element) -> (M,K) of A as it was before two of four were taken: of a lane's 16 elements every four in turn are
  // a group, whose two values are a register.
  using ALayout =
      Layout<Shape<Shape<_4, _8>, Shape<_4, _2, _2>>, Stride<Stride<Int<64>, _1>, Stride<_16, _8, Int<256>>>>;
  // (lane, group of 4 bits) -> (M, group along K) of two atoms side by side along K, 16 groups.
  using ELayout =
      Layout<Shape<Shape<_2, _2, _8>, Shape<_4, _2>>, Stride<Stride<Int<64>, Int<128>, _1>, Stride<_16, _8>>>;
  using BLayout = Layout<Shape<Shape<_4, _8>, Shape<_2, _4>>, Stride<Stride<_16, _1>, Stride<_8, Int<64>>>>;
  using CLayout = SM80_16x8_Row;
};

}  // namespace cute
