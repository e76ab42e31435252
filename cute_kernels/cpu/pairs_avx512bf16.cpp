// The products of bf16 by pairs, for CPUs with AVX512_BF16 and AVX512_VBMI2.
#include "cute_kernels/cpu/kernels.hpp"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI2__)

#if defined(__GNUC__) && !defined(__clang__)  // GCC's own intrinsics start from undefined vectors and warn about it
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "cute_kernels/cpu/operand_rows.hpp"
#include "cute_kernels/cpu/simd_avx512.hpp"
#include "cute_kernels/cpu/tile_shape.hpp"

namespace cute_kernels::cpu {
namespace {

using Words = Avx512::Words;
using Float = Avx512::Float;

constexpr int kTileSums = kTileRows * kTileBlocks * 2;
constexpr int kWeightPart = kTileColumns * 16;

// The magnitudes as 16-bit integers: none between 0 and kMinPairMagnitude, none from infinity up.
class MagnitudeCheck {
 public:
  void add(Words halves) {
    Words magnitude = _mm512_and_si512(halves, _mm512_set1_epi16(0x7fff));
    most_ = _mm512_max_epu16(most_, magnitude);
    least_ = _mm512_min_epu16(least_, _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)));  // 0 becomes the largest
  }
  bool passed() const {
    return _mm512_cmpge_epu16_mask(most_, _mm512_set1_epi16(0x7f80)) == 0 &&
           _mm512_cmplt_epu16_mask(least_, _mm512_set1_epi16(kMinPairMagnitude - 1)) == 0;
  }

 private:
  Words most_ = _mm512_setzero_si512(), least_ = _mm512_set1_epi16(-1);
};

// Of 16 words.
Words shuffle_bits16(Words words) {
  return shuffle_bits(words, [](Words w, auto shift, uint32_t mask) {
    constexpr int kShift = decltype(shift)::value, kXorAnd = 0x28, kXor = 0x96;
    Words under = _mm512_set1_epi32(static_cast<int>(mask));
    Words t = _mm512_ternarylogic_epi32(w, _mm512_srli_epi32(w, kShift), under, kXorAnd);
    return _mm512_ternarylogic_epi32(w, t, _mm512_slli_epi32(t, kShift), kXor);
  });
}

void unpack_pair_masks(uint32_t const* block, int bitmap_rows, uint32_t* masks) {
  constexpr __mmask32 kOddHalves = 0xaaaaaaaau;
  for (int row = 0; row < bitmap_rows; row += 2, masks += kTileStreams * kTileLanes)
    for (int lane = 0; lane < kTileLanes; lane += 16) {
      uint32_t const* words = block + row * kTileLanes + lane;
      Words first = shuffle_bits16(Avx512::load_words(words));
      Words second = shuffle_bits16(Avx512::load_words(words + kTileLanes));
      _mm512_storeu_si512(masks + lane, _mm512_mask_blend_epi16(kOddHalves, first, _mm512_slli_epi32(second, 16)));
      _mm512_storeu_si512(masks + kTileLanes + lane,
                          _mm512_mask_blend_epi16(kOddHalves, _mm512_srli_epi32(first, 16), second));
    }
}

bool unpack(uint32_t const* block, int bitmap_rows, int value_rows, PairedTile const& tile) {
  unpack_pair_masks(block, bitmap_rows, tile.masks);
  MagnitudeCheck check;
  uint32_t const* values = block + bitmap_rows * kTileLanes;
  for (int lane0 = 0; lane0 < kTileLanes; lane0 += 16)
    for (int row0 = 0; row0 < value_rows; row0 += 16) {
      Words words[16];  // row row0 + i of 16 lanes, then lane lane0 + i of 16 rows
      uint32_t const* corner = values + row0 * kTileLanes + lane0;
      for (int i = 0; i < 16; ++i) {
        words[i] = row0 + i < value_rows ? Avx512::load_words(corner + i * kTileLanes) : Avx512::zero_words();
        check.add(words[i]);
      }
      Avx512::transpose(words);
      uint16_t* stream = tile.streams + lane0 * kTileStreams * tile.stride + row0;
      for (int i = 0; i < 16; ++i, stream += kTileStreams * tile.stride) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(stream), _mm512_cvtepi32_epi16(words[i]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(stream + tile.stride),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(words[i], 16)));
      }
    }
  return check.passed();
}

// The next 32 entries of both streams of a lane as pairs: indices 0-15 and 16-31 of pair_entry.
struct Pairs {
  __m512bh low, high;
};

class PairReader {
 public:
  PairReader(PairedTile const& tile, int lane)
      : masks_(tile.masks + lane),
        first_(tile.streams + lane * kTileStreams * tile.stride),
        second_(first_ + tile.stride) {}

  Pairs next() {
    uint32_t const first_mask = masks_[0], second_mask = masks_[kTileLanes];
    Words first = _mm512_loadu_si512(first_), second = _mm512_loadu_si512(second_);
    asm("" : "+v"(first), "+v"(second));  // expand in registers
    first = _mm512_maskz_expand_epi16(first_mask, first);
    second = _mm512_maskz_expand_epi16(second_mask, second);
    masks_ += kTileStreams * kTileLanes;
    first_ += _mm_popcnt_u32(first_mask);
    second_ += _mm_popcnt_u32(second_mask);
    return {(__m512bh)_mm512_unpacklo_epi16(first, second), (__m512bh)_mm512_unpackhi_epi16(first, second)};
  }

 private:
  uint32_t const* masks_;
  uint16_t const *first_, *second_;
};

inline __m512bh load_pairs(uint32_t const* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline __m512bh repeat8_pairs(uint32_t const* p) {
  return (__m512bh)_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<__m256i const*>(p)));
}

// kTogether blocks of tokens are interleaved: a product into a sum waits for the one before it into
// the same sum, and the scheduler does not look far enough ahead to fill that latency by itself.
template <int HeadDim, int N>
void multiply_keys(PairedTile const& tile, uint32_t const* panel, float* sums) {
  constexpr int kEntries = HeadDim / 4, kBlocks = kEntries / kPairBlock, kPanel = kTileColumns * kEntries;
  constexpr int kTogether = 2;
  for (int row = 0; row < kTileRows; ++row) {
    Float sum[N][kTileBlocks];
    for (int n = 0; n < N; ++n)
      for (int c = 0; c < kTileBlocks; ++c) sum[n][c] = _mm512_setzero_ps();
    for (int column = 0; column < kTileColumns; ++column) {
      PairReader reader(tile, row * kTileColumns + column);
      uint32_t const* q = panel + column * kEntries;
#pragma GCC unroll 4
      for (int c = 0; c < kTileBlocks; c += kTogether) {
        Pairs k[kTogether][kBlocks];
        for (int i = 0; i < kTogether; ++i)
          for (int w = 0; w < kBlocks; ++w) k[i][w] = reader.next();
        for (int w = 0; w < kBlocks; ++w)
          for (int half = 0; half < 2; ++half)
            for (int n = 0; n < N; ++n) {
              __m512bh q_pairs = load_pairs(q + n * kPanel + w * kPairBlock + half * 16);
              for (int i = 0; i < kTogether; ++i)
                sum[n][c + i] = _mm512_dpbf16_ps(sum[n][c + i], half ? k[i][w].high : k[i][w].low, q_pairs);
            }
      }
    }
    for (int n = 0; n < N; ++n) Avx512::fold(sum[n], sums + n * kTileSums + row * kTileBlocks * 2);
  }
}

// As above, with pairs of blocks of 16 channels instead of blocks of tokens, C of them at a time.
template <int HeadDim, int N, int Parts>
void multiply_values(PairedTile const& tile, uint32_t const* panel, float* sums) {
  constexpr int kPairs = HeadDim / 32, kSums = kTileRows * HeadDim / 16 * kSumWidth;
  constexpr int kFit = Avx512::kAccumulators / N, C = kFit < kPairs ? kFit : kPairs;
  constexpr int kTogether = 4;
  static_assert(C % kTogether == 0 && kPairs % C == 0);
  for (int row = 0; row < kTileRows; ++row) {
    PairReader readers[kTileColumns] = {{tile, row * kTileColumns},
                                        {tile, row * kTileColumns + 1},
                                        {tile, row * kTileColumns + 2},
                                        {tile, row * kTileColumns + 3}};
    for (int c0 = 0; c0 < kPairs; c0 += C) {
      float* out = sums + (row * kPairs + c0) * 16;
      Float sum[N][C];
      for (int n = 0; n < N; ++n)
        for (int c = 0; c < C; ++c) sum[n][c] = _mm512_loadu_ps(out + n * kSums + 16 * c);
      for (int column = 0; column < kTileColumns; ++column) {
        PairReader& reader = readers[column];
        uint32_t const* p = panel + column * 16;
#pragma GCC unroll 4
        for (int c = 0; c < C; c += kTogether) {
          Pairs v[kTogether];
          for (int i = 0; i < kTogether; ++i) v[i] = reader.next();
          for (int half = 0; half < 2; ++half)
            for (int part = 0; part < Parts; ++part)
              for (int n = 0; n < N; ++n) {
                __m512bh p_pairs = repeat8_pairs(p + (n * Parts + part) * kWeightPart + half * 8);
                for (int i = 0; i < kTogether; ++i)
                  sum[n][c + i] = _mm512_dpbf16_ps(sum[n][c + i], half ? v[i].high : v[i].low, p_pairs);
              }
        }
      }
      for (int n = 0; n < N; ++n)
        for (int c = 0; c < C; ++c) _mm512_storeu_ps(out + n * kSums + 16 * c, sum[n][c]);
    }
  }
}

template <int HeadDim>
void multiply_keys_rows(PairedTile const& tile, uint32_t const* panel, int rows, float* sums) {
  for_row_blocks<kMaxRows>(rows, [&](int row, auto n) {
    multiply_keys<HeadDim, decltype(n)::value>(tile, panel + row * HeadDim, sums + row * kTileSums);
  });
}

template <int HeadDim, int Parts>
void multiply_values_rows(PairedTile const& tile, uint32_t const* panel, int rows, float* sums) {
  for_row_blocks<kMaxRows>(rows, [&](int row, auto n) {
    multiply_values<HeadDim, decltype(n)::value, Parts>(tile, panel + row * Parts * kWeightPart,
                                                        sums + row * kTileRows * HeadDim / 16 * kSumWidth);
  });
}

void multiply_keys_any(PairedTile const& tile, int head_dim, uint32_t const* panel, int rows, float* sums) {
  switch (head_dim) {
    case 128:
      return multiply_keys_rows<128>(tile, panel, rows, sums);
    case 256:
      return multiply_keys_rows<256>(tile, panel, rows, sums);
  }
  throw_head_dim(head_dim);
}

template <int HeadDim>
void multiply_values_parts(PairedTile const& tile, uint32_t const* panel, int parts, int rows, float* sums) {
  (parts == 1 ? multiply_values_rows<HeadDim, 1> : multiply_values_rows<HeadDim, 2>)(tile, panel, rows, sums);
}

void multiply_values_any(PairedTile const& tile, int head_dim, uint32_t const* panel, int parts, int rows,
                         float* sums) {
  switch (head_dim) {
    case 128:
      return multiply_values_parts<128>(tile, panel, parts, rows, sums);
    case 256:
      return multiply_values_parts<256>(tile, panel, parts, rows, sums);
  }
  throw_head_dim(head_dim);
}

// out[i] = in[index[i]] for 64 16-bit values.
struct Halves64 {
  Words low, high;

  Halves64 permuted(uint8_t const* index) const {
    auto indices = [&](int i) {
      return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<__m256i const*>(index + i)));
    };
    return {_mm512_permutex2var_epi16(low, indices(0), high), _mm512_permutex2var_epi16(low, indices(32), high)};
  }
};

bool make_pair_weights(WeightRow const& p, uint8_t const* position, int parts, uint32_t* panel) {
  alignas(64)
      uint16_t split[2][kTokensOfTile] = {};  // by token: the upper 16 bits of a weight, and those of what is left
  if (p.dtype == Number::kBFloat16) {
    copy_tokens(split[0], p.data, p.valid);
  } else {
    alignas(64) float weights[kTokensOfTile];
    widen_weights<Avx512>(p, weights);
    for (int i = 0; i < kTokensOfTile; i += 16) {
      Float w = Avx512::load(weights + i);
      Words high = _mm512_and_si512(_mm512_castps_si512(w), _mm512_set1_epi32(-65536));
      high = _mm512_mask_mov_epi32(high, _mm512_cmp_ps_mask(w, w, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
      __mmask16 finite = _mm512_testn_epi32_mask(high, high) |  // nothing is left of Inf and NaN
                         _mm512_cmplt_epu32_mask(_mm512_slli_epi32(high, 1), _mm512_set1_epi32(-0x1000000));
      Words low = _mm512_castps_si512(_mm512_maskz_sub_ps(finite, w, _mm512_castsi512_ps(high)));
      auto store_upper = [&](uint16_t* out, Words words) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
      };
      store_upper(split[0] + i, high);
      store_upper(split[1] + i, low);
    }
  }
  Words most = _mm512_setzero_si512();
  for (int part = 0; part < parts; ++part) {
    Halves64 by_token = {_mm512_load_si512(split[part]), _mm512_load_si512(split[part] + 32)};
    Halves64 by_position = by_token.permuted(p.token_order);
    for (int i = 0; i < kWeightPart; i += 32) {
      Halves64 pairs = by_position.permuted(position + i * kTileStreams);
      _mm512_storeu_si512(panel + part * kWeightPart + i, pairs.low);
      _mm512_storeu_si512(panel + part * kWeightPart + i + 16, pairs.high);
    }
    if (part == 0) most = _mm512_max_epu16(_mm512_slli_epi16(by_token.low, 1), _mm512_slli_epi16(by_token.high, 1));
  }
  return _mm512_test_epi16_mask(most, most) == 0 ||
         _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16(static_cast<short>(kMinPairMagnitude << 1))) != 0;
}

}  // namespace

PairKernels const* avx512_bf16_pair_kernels() {
  static constexpr PairKernels made = {unpack, multiply_keys_any, make_pair_weights, multiply_values_any};
  return &made;
}

}  // namespace cute_kernels::cpu

#else

cute_kernels::cpu::PairKernels const* cute_kernels::cpu::avx512_bf16_pair_kernels() { return nullptr; }

#endif
