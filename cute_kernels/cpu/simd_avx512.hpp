// Vectors of 16 floats.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace cute_kernels::cpu {
namespace {

struct Avx512 {
  static constexpr char const* kName = "avx512";
  static constexpr int kWidth = 16;
  static constexpr int kAccumulators = 16;
  using Float = __m512;
  using Words = __m512i;

  static Float zero() { return _mm512_setzero_ps(); }
  static Float broadcast(float value) { return _mm512_set1_ps(value); }
  static Float load(float const* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
  static Float load8(float const* p) { return _mm512_zextps256_ps512(_mm256_loadu_ps(p)); }
  static void store8(float* p, Float v) {
    _mm256_storeu_ps(p, _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
  }
  static Float multiply_add(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static Float expand(float const* p, uint32_t mask) {
    Float v = _mm512_loadu_ps(p);
#if defined(__GNUC__)
    asm(""
        : "+v"(v));  // expand in registers: the compiler would fold the load, and expanding loads are slow on some CPUs
#endif
    return _mm512_maskz_expand_ps(static_cast<__mmask16>(mask), v);
  }
  static int count(uint32_t mask) {
#if defined(__GNUC__)
    asm("" : "+r"(mask));  // count 32 bits: a 16-bit popcnt waits for the register it writes
#endif
    return _mm_popcnt_u32(mask);
  }
  static void fold(Float const (&v)[4], float* out) {
    auto halves = [](Float a, Float b) {  // a folded to 2 quarters, b folded to 2 quarters
      return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    Float ab = halves(v[0], v[1]), cd = halves(v[2], v[3]);
    Float quarters = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    Float sums = _mm512_add_ps(quarters, _mm512_permute_ps(quarters, 0xb1));  // each twice
    __m512i const once = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
    _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(once, sums)));
  }

  static Words load_words(uint32_t const* p) { return _mm512_loadu_si512(p); }
  static Words zero_words() { return _mm512_setzero_si512(); }
  static void transpose(Words (&r)[16]) {
    Words t[16];
    for (int i = 0; i < 16; i += 2) {  // pairs of rows
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // r[i + j]: column 4 k + j of rows i .. i + 3 in quarter k
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; ++j) {  // transpose of 4x4 quarters
      Words a = _mm512_shuffle_i32x4(r[j], r[j + 4], 0x88), b = _mm512_shuffle_i32x4(r[j + 8], r[j + 12], 0x88);
      Words c = _mm512_shuffle_i32x4(r[j], r[j + 4], 0xdd), d = _mm512_shuffle_i32x4(r[j + 8], r[j + 12], 0xdd);
      t[j] = _mm512_shuffle_i32x4(a, b, 0x88);
      t[j + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
      t[j + 4] = _mm512_shuffle_i32x4(c, d, 0x88);
      t[j + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
    for (int i = 0; i < 16; ++i) r[i] = t[i];
  }
  template <bool kBFloat16>
  static Float low(Words words) {
    if constexpr (kBFloat16)
      return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    else
      return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
  }
  template <bool kBFloat16>
  static Float high(Words words) {
    if constexpr (kBFloat16)
      return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-65536)));
    else
      return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
  }

  template <bool kBFloat16>
  static Float widen(uint16_t const* p) {
    __m256i bits = _mm256_loadu_si256(reinterpret_cast<__m256i const*>(p));
    if constexpr (kBFloat16)
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    else
      return _mm512_cvtph_ps(bits);
  }
  template <bool kBFloat16>
  static void narrow(Float v, uint16_t* p) {
    __m256i bits;
    if constexpr (kBFloat16) {
      __m512i x = _mm512_castps_si512(v), high = _mm512_srli_epi32(x, 16);
      __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
      __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd), 16);
      __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
      bits = _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40)));
    } else {
      bits = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits);
  }
  static Float scale(Float v, float factor) { return _mm512_mul_ps(v, _mm512_set1_ps(factor)); }
  static void permute64(float const* in, uint8_t const* index, float* out) {
    Float t0 = load(in), t1 = load(in + 16), t2 = load(in + 32), t3 = load(in + 48);
    for (int i = 0; i < 64; i += 16) {
      Words from = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<__m128i const*>(index + i)));
      __mmask16 upper = _mm512_test_epi32_mask(from, _mm512_set1_epi32(32));
      store(out + i,
            _mm512_mask_blend_ps(upper, _mm512_permutex2var_ps(t0, from, t1), _mm512_permutex2var_ps(t2, from, t3)));
    }
  }

  static uint32_t at_least(uint16_t const* keys, uint16_t threshold) {
    return _mm512_cmpge_epu16_mask(_mm512_loadu_si512(keys), _mm512_set1_epi16(static_cast<short>(threshold)));
  }
};

}  // namespace
}  // namespace cute_kernels::cpu
