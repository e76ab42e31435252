// The project's only inline PTX: instructions that neither CUDA C++ nor CuTe offers in the form needed here.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>
#include <cute/config.hpp>

namespace cute_kernels::ptx {

// A 16-bit load zero-extends: the upper half of the result is the zeros that absent elements need.
// No memory clobber, so that other loads may be scheduled around it; volatile, as the barriers are that it has to stay
// between.
CUTE_DEVICE uint32_t load_shared_u16(uint32_t address) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
  return value;
}

// Bits of `low` where the mask is 1, of `high` where it is 0. Written as (low & mask) | (high & ~mask) with a constant
// mask, this takes two instructions: compilers see two constants, and an instruction holds one.
CUTE_DEVICE uint32_t blend(uint32_t low, uint32_t high, uint32_t mask) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xe2;" : "=r"(result) : "r"(low), "r"(mask), "r"(high));
  return result;
}

// (x & mask) | bits, in one instruction although both may be constants.
CUTE_DEVICE uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
  return result;
}

// Where `word` has one of `bits`: loads a 16-bit value; stores one and moves the address on. A register may be wider
// than what it loads or stores.
CUTE_DEVICE void load_shared_u16_if(uint32_t& value, uint32_t address, uint32_t word, uint32_t bits) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b32 t;\n"
      "and.b32 t, %2, %3;\n"
      "setp.ne.u32 p, t, 0;\n"
      "@p ld.shared.u16 %0, [%1];\n"
      "}"
      : "+r"(value)
      : "r"(address), "r"(word), "r"(bits));
}

CUTE_DEVICE void append_shared_u16_if(uint32_t& address, uint32_t value, int step, uint32_t word, uint32_t bits) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      ".reg .b32 t;\n"
      "and.b32 t, %3, %4;\n"
      "setp.ne.u32 p, t, 0;\n"
      "@p st.shared.u16 [%0], %1;\n"
      "@p add.u32 %0, %0, %2;\n"
      "}"
      : "+r"(address)
      : "r"(value), "r"(step), "r"(word), "r"(bits)
      : "memory");
}

// The lane, read anew: what is worked out from it is not held on to through loops that need the registers.
CUTE_DEVICE int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// In a branch that a warp takes as a whole or not at all: makes it a jump rather than predicated code. A predicated
// load from shared memory takes an issue slot there even if no lane makes it.
CUTE_DEVICE void keep_branch() { __syncwarp(); }

// Keeps the compiler from knowing how x came about, and so from holding on to parts of that.
CUTE_DEVICE void forget(uint32_t& x) { asm("" : "+r"(x)); }

CUTE_DEVICE uint32_t load_shared_u32(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// A word whose address is a register and a constant; without a memory clobber, as load_shared_u16.
template <int kOffset>
CUTE_DEVICE uint32_t load_shared_word(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1 + %2];" : "=r"(value) : "r"(address), "n"(kOffset));
  return value;
}

// x * y + z in one instruction, which a compiler makes a shift and a sum of where y is a power of two.
CUTE_DEVICE uint32_t multiply_add(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t result;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}

// Two pairs of fp16, x - y.
CUTE_DEVICE uint32_t subtract_halves(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

// x * y
CUTE_DEVICE uint32_t multiply_halves(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

// The same of two bf16, on CC 9.0.
CUTE_DEVICE uint32_t multiply_bfloats(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

// x * y + z
CUTE_DEVICE uint32_t multiply_add_halves(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}

// The nearest numbers of E4M3, saturating, NaN without a sign: of x0 in the lower byte. CC 8.9 and later.
CUTE_DEVICE uint32_t floats_to_e4m3(float x0, float x1) {
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(x1), "f"(x0));
  return codes;
}

// Four numbers of E4M3 as fp16, exactly, in their order.
CUTE_DEVICE void e4m3_to_halves(uint32_t codes, uint32_t& r0, uint32_t& r1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(r0), "=r"(r1)
      : "r"(codes));
#else
  auto convert = [](uint32_t x) {                                          // x: a code in the upper byte of either half
    uint32_t halves = (x & 0x80008000u) | (x >> 1 & 0x3f803f80u), scaled;  // 2^-8 of the number, subnormal ones too
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(scaled) : "r"(halves), "r"(0x5c005c00u));  // 256
    uint32_t nan = ((halves & 0x3f803f80u) + 0x00800080u) & 0x40004000u;             // all ones: NaN
    return scaled | (nan | nan >> 1) | nan >> 2 | nan >> 3 | nan >> 4 | nan >> 5;
  };
  asm("prmt.b32 %0, %1, 0, 0x1404;" : "=r"(r0) : "r"(codes));
  asm("prmt.b32 %0, %1, 0, 0x3424;" : "=r"(r1) : "r"(codes));
  r0 = convert(r0), r1 = convert(r1);
#endif
}

// __byte_perm spends a LOP3 on masking the selector with 0x7777; prmt itself reads only the low 16 bits.
CUTE_DEVICE uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(selector));
  return result;
}

// The sum with two signed halves times two unsigned bytes, the lower or the upper ones of `bytes`.
CUTE_DEVICE int dot2_low(uint32_t halves, uint32_t bytes, int sum) {
  asm("dp2a.lo.s32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(halves), "r"(bytes));
  return sum;
}

CUTE_DEVICE int dot2_high(uint32_t halves, uint32_t bytes, int sum) {
  asm("dp2a.hi.s32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(halves), "r"(bytes));
  return sum;
}

// 2^x within 2 units of the last place; results below the smallest normal number are 0.
CUTE_DEVICE float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The same for the logarithm.
CUTE_DEVICE float log2_approximate(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x within a unit of the last place, subnormal numbers included.
CUTE_DEVICE float reciprocal_approximate(float x) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Keeps the compiler from moving memory accesses across.
CUTE_DEVICE void compiler_fence() { asm volatile("" ::: "memory"); }

// `threads` of the CTA, a multiple of 32, wait for one another at a barrier of 0 to 15. CUTLASS has it for CC 9.0 only,
// and without the order of memory accesses.
CUTE_DEVICE void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives without waiting.
CUTE_DEVICE void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// As named_barrier_sync, and returns whether `holds` is true in any of the threads.
CUTE_DEVICE bool named_barrier_any(int barrier, int threads, bool holds) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %3, 0;\n"
      "bar.red.or.pred p, %1, %2, p;\n"
      "selp.s32 %0, 1, 0, p;\n"
      "}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(static_cast<int>(holds))
      : "memory");
  return any;
}

// L2 policy of data that is read once.
CUTE_DEVICE uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

CUTE_DEVICE void prefetch(void const* global) { asm volatile("prefetch.global.L1 [%0];" ::"l"(global)); }

// Copies `bytes` (0 to 16) of 16 and fills the rest with zeros.
CUTE_DEVICE void cp_async_16(uint32_t shared, void const* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

CUTE_DEVICE void cp_async_16_hint(uint32_t shared, void const* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(policy)
               : "memory");
}

// TMA without a tensor map (CC 9.0): `bytes`, a multiple of 16, from and to addresses that are; counted by `barrier`.
CUTE_DEVICE void bulk_copy(void* shared, void const* global, int bytes, void* barrier, uint64_t policy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(cute::cast_smem_ptr_to_uint(shared)),
      "l"(global), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(barrier)), "l"(policy)
      : "memory");
#endif
}

// The same place in the shared memory of a CTA of the cluster.
template <class T>
CUTE_DEVICE T* map_to_cta(T* shared, [[maybe_unused]] uint32_t cta) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t mapped;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(shared), "r"(cta));
  return reinterpret_cast<T*>(mapped);
#else
  return shared;
#endif
}

// From this CTA's shared memory to the same place in that of another CTA of the cluster; counted by its `barrier`.
CUTE_DEVICE void bulk_copy_to_cta(void* shared, int bytes, void* barrier, uint32_t cta) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t from = cute::cast_smem_ptr_to_uint(shared);
  asm volatile(
      "{\n"
      ".reg .b32 to, full;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 full, %2, %3;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%0], %1, [full];\n"
      "}" ::"r"(from),
      "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(barrier)), "r"(cta)
      : "memory");
#endif
}

// Programmatic dependent launch (CC 9.0). No-ops on older devices, where launches are ordinary.
CUTE_DEVICE void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

CUTE_DEVICE void wait_for_primary() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace cute_kernels::ptx
