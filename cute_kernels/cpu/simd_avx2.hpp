// Vectors of 8 floats.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace cute_kernels::cpu {
namespace {

// Expansion of 8 entries: entry i comes from index (set bits below i); its sign bit is set where bit i is not.
struct ExpandTable {
  alignas(32) uint32_t index[256][8];
};
constexpr ExpandTable make_expand_table() {
  ExpandTable table{};
  for (uint32_t mask = 0; mask < 256; ++mask) {
    uint32_t next = 0;
    for (int i = 0; i < 8; ++i) {
      bool set = (mask >> i) & 1;
      table.index[mask][i] = set ? next : 0x80000000u;
      next += set;
    }
  }
  return table;
}
constexpr ExpandTable kExpandTable = make_expand_table();

struct Avx2 {
  static constexpr char const* kName = "avx2";
  static constexpr int kWidth = 8;
  static constexpr int kAccumulators = 16;  // a few spill, which costs less than expanding again
  using Float = __m256;
  using Words = __m256i;

  static Float zero() { return _mm256_setzero_ps(); }
  static Float broadcast(float value) { return _mm256_set1_ps(value); }
  static Float load(float const* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Float v) { _mm256_storeu_ps(p, v); }
  static Float load8(float const* p) { return load(p); }
  static void store8(float* p, Float v) { store(p, v); }
  static Float multiply_add(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static Float expand(float const* p, uint32_t mask) {
    __m256i index = _mm256_load_si256(reinterpret_cast<__m256i const*>(kExpandTable.index[mask]));
    Float v = _mm256_permutevar8x32_ps(_mm256_loadu_ps(p), index);
    return _mm256_blendv_ps(v, _mm256_setzero_ps(), _mm256_castsi256_ps(index));
  }
  static int count(uint32_t mask) { return _mm_popcnt_u32(mask); }
  static void fold(Float const (&v)[4], float* out) {
    auto halves = [](Float a, Float b) {
      return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    };
    Float sums = _mm256_hadd_ps(halves(v[0], v[1]), halves(v[2], v[3]));
    _mm256_storeu_ps(out, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xd8)));  // was a c b d
  }

  static Words load_words(uint32_t const* p) { return _mm256_loadu_si256(reinterpret_cast<__m256i const*>(p)); }
  static Words zero_words() { return _mm256_setzero_si256(); }
  static void transpose(Words (&r)[8]) {
    Words t[8];
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; ++j) {
      t[j] = _mm256_permute2x128_si256(r[j], r[j + 4], 0x20);
      t[j + 4] = _mm256_permute2x128_si256(r[j], r[j + 4], 0x31);
    }
    for (int i = 0; i < 8; ++i) r[i] = t[i];
  }
  template <bool kBFloat16>
  static Float low(Words words) {
    if constexpr (kBFloat16)
      return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    else
      return high<false>(_mm256_slli_epi32(words, 16));
  }
  template <bool kBFloat16>
  static Float high(Words words) {
    if constexpr (kBFloat16) {
      return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(-65536)));
    } else {
      __m256i halves = _mm256_srli_epi32(words, 16);
      __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
      return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
    }
  }

  template <bool kBFloat16>
  static Float widen(uint16_t const* p) {
    __m128i bits = _mm_loadu_si128(reinterpret_cast<__m128i const*>(p));
    if constexpr (kBFloat16)
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    else
      return _mm256_cvtph_ps(bits);
  }
  template <bool kBFloat16>
  static void narrow(Float v, uint16_t* p) {
    __m128i bits;
    if constexpr (kBFloat16) {
      __m256i x = _mm256_castps_si256(v), high = _mm256_srli_epi32(x, 16);
      __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
      __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd), 16);
      __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
      __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
      __m256i words = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(nan));
      bits = _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08));
    } else {
      bits = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bits);
  }
  static Float scale(Float v, float factor) { return _mm256_mul_ps(v, _mm256_set1_ps(factor)); }
  static void permute64(float const* in, uint8_t const* index, float* out) {
    for (int i = 0; i < 64; ++i) out[i] = in[index[i]];
  }

  static uint32_t at_least(uint16_t const* keys, uint16_t threshold) {
    __m256i const* vectors = reinterpret_cast<__m256i const*>(keys);
    __m256i below =
        _mm256_set1_epi16(static_cast<short>(threshold - 1));  // keys are below 2^15: signed compare is right
    __m256i a = _mm256_cmpgt_epi16(_mm256_loadu_si256(vectors), below);
    __m256i b = _mm256_cmpgt_epi16(_mm256_loadu_si256(vectors + 1), below);
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8);
    return static_cast<uint32_t>(_mm256_movemask_epi8(bytes));
  }
};

}  // namespace
}  // namespace cute_kernels::cpu
