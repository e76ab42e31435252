// Which kernels serve this CPU.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cute_kernels/cpu/kernels.hpp"

namespace cute_kernels::cpu {
namespace {

bool cpu_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool cpu_has_avx512() {
#if defined(__x86_64__)
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

bool cpu_has_avx512_bf16() {
#if defined(__x86_64__)
  return cpu_has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi2");
#else
  return false;
#endif
}

// The kernels of AVX-512 with those for pairs of bf16, or null.
Kernels const* with_pairs(Kernels const* kernels, PairKernels const* pairs) {
  if (!kernels || !pairs) return nullptr;
  static Kernels combined = *kernels;
  combined.name = "avx512bf16";
  combined.pairs = pairs;
  return &combined;
}

struct Candidate {
  char const* name;
  Kernels const* kernels;  // null: not on this CPU or not in this build
};

}  // namespace

void throw_head_dim(int head_dim) {
  throw std::invalid_argument("head_dim " + std::to_string(head_dim) + " is not instantiated for these CPU kernels");
}

Kernels const& kernels() {
  static Candidate const candidates[] = {
      // best first
      {"avx512bf16", cpu_has_avx512_bf16() ? with_pairs(avx512_kernels(), avx512_bf16_pair_kernels()) : nullptr},
      {"avx512", cpu_has_avx512() ? avx512_kernels() : nullptr},
      {"avx2", cpu_has_avx2() ? avx2_kernels() : nullptr},
      {"scalar", scalar_kernels()},
  };
  char const* variable = std::getenv("CUTE_KERNELS_CPU_ISA");
  std::string const wanted = variable ? variable : "";
  for (Candidate const& candidate : candidates) {
    if (wanted.empty() && candidate.kernels) return *candidate.kernels;
    if (wanted != candidate.name) continue;
    if (!candidate.kernels)
      throw std::runtime_error("CUTE_KERNELS_CPU_ISA=" + wanted + " is not available on this CPU");
    return *candidate.kernels;
  }
  throw std::runtime_error("CUTE_KERNELS_CPU_ISA=" + wanted +
                           " is unknown; it takes avx512bf16, avx512, avx2 or scalar");
}

}  // namespace cute_kernels::cpu
