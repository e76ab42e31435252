// In place of cute_kernels/common/ptx.hpp in programs with the line `// include: tests/host/emulated`: what decoders use
// of it, on the host. Addresses are bytes from `shared_memory`.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cstring>
#include <cute/config.hpp>

inline unsigned char const* shared_memory;

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t bits) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (bits & 31));
}
uint32_t __dp4a(uint32_t, uint32_t, uint32_t);  // of the decoder of 16 bits, which is not emulated

namespace cute_kernels::ptx {

int dot2_high(uint32_t, uint32_t, int);  // nor this

inline float float_of_half(uint32_t bits) {
  return static_cast<float>(cutlass::half_t::bitcast(static_cast<uint16_t>(bits)));
}
inline uint32_t half_of_float(float x) { return cutlass::half_t(x).storage; }

template <class Word>
uint32_t load(uint32_t address) {
  Word word;
  std::memcpy(&word, shared_memory + address, sizeof(word));
  return word;
}
inline uint32_t load_shared_u16(uint32_t address) { return load<uint16_t>(address); }
inline uint32_t load_shared_u32(uint32_t address) { return load<uint32_t>(address); }
template <int kOffset>
uint32_t load_shared_word(uint32_t address) {
  return load_shared_u32(address + kOffset);
}

inline uint32_t blend(uint32_t low, uint32_t high, uint32_t mask) { return (low & mask) | (high & ~mask); }
inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }
inline uint32_t multiply_add(uint32_t x, uint32_t y, uint32_t z) { return x * y + z; }

inline uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t choice = selector >> 4 * i & 15;
    auto byte = static_cast<uint32_t>((uint64_t{y} << 32 | x) >> 8 * (choice & 7) & 0xff);
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;  // its sign
    result |= byte << 8 * i;
  }
  return result;
}

inline uint32_t subtract_halves(uint32_t x, uint32_t y) {
  uint32_t low = half_of_float(float_of_half(x & 0xffff) - float_of_half(y & 0xffff));
  return low | half_of_float(float_of_half(x >> 16) - float_of_half(y >> 16)) << 16;
}

inline uint32_t multiply_add_halves(uint32_t x, uint32_t y, uint32_t z) {
  auto one = [](uint32_t a, uint32_t b, uint32_t c) {
    return half_of_float(float_of_half(a & 0xffff) * float_of_half(b & 0xffff) + float_of_half(c & 0xffff));
  };
  return one(x, y, z) | one(x >> 16, y >> 16, z >> 16) << 16;
}

float e4m3_number(uint32_t code);  // by the program
inline void e4m3_to_halves(uint32_t codes, uint32_t& r0, uint32_t& r1) {
  auto half = [codes](int i) { return half_of_float(e4m3_number(codes >> 8 * i & 0xff)); };
  r0 = half(0) | half(1) << 16, r1 = half(2) | half(3) << 16;
}

}  // namespace cute_kernels::ptx
