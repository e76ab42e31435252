// Selects which elements are kept: per token the `keep` largest magnitudes, ties to the lower channel. No sort: a lane
// takes a token, turns its magnitudes into bit planes and finds the keep-th largest bit by bit, from the highest plane
// down. Each step then looks at 32 channels a word, and nothing of it crosses lanes.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/pointer.hpp>
#include <type_traits>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/compress/bits.hpp"
#include "cute_kernels/compress/compress.hpp"

namespace cute_kernels::compress {

inline constexpr int kHalfTokens = 32;  // of a tile: a warp's, a lane each
inline constexpr int kHalves = format::kTileTokens / kHalfTokens;
inline constexpr int kVectorValues = 8;  // of 16 bits in 16 bytes
inline constexpr int kMagnitudeBits = 15;

// `keep_largest` takes a number that no token reaches where `keep` is 0, which stands for every nonzero.
constexpr int most_kept(int keep) { return keep > 0 ? keep : format::kMaxHeadDim + 1; }

template <int Words>
struct SelectStorage {
  static constexpr int kVectors = 32 * Words / kVectorValues;
  uint4 dense[kHalfTokens][kVectors + 1];  // an odd stride: lanes that walk along their rows have no bank conflicts
  uint32_t kept[kHalfTokens][Words];
};

// Starts to copy `tokens` rows of half a tile to shared memory, with zeros for tokens and channels that are not there.
template <int Words>
__device__ void start_rows(SelectStorage<Words>& s, uint16_t const* from, int64_t stride_token, int head_dim,
                           int tokens, bool vectors, int lane) {
  constexpr int kVectors = SelectStorage<Words>::kVectors;
  if (!vectors) {
    for (int t = 0; t < kHalfTokens; ++t)
      for (int c = lane; c < kVectors * kVectorValues; c += 32)
        reinterpret_cast<uint16_t*>(s.dense[t])[c] =
            t < tokens && c < head_dim ? from[t * stride_token + c] : uint16_t{0};
    return;
  }
  constexpr int kRows = 32 / kVectors;  // at a time
  int row = lane / kVectors, v = lane % kVectors;
  uint16_t const* source = from + row * stride_token + v * kVectorValues;
  int rows = v * kVectorValues < head_dim ? tokens : 0;  // that this lane's column of vectors has
#pragma unroll
  for (int t = 0; t < kHalfTokens; t += kRows) {
    ptx::cp_async_16(cute::cast_smem_ptr_to_uint(&s.dense[row + t][v]), source, row + t < rows ? 16 : 0);
    source += kRows * stride_token;
  }
  cute::cp_async_fence();
}

// The magnitudes of the lane's token, without the signs.
template <int Words>
__device__ void read_planes(SelectStorage<Words> const& s, uint32_t (&planes)[Words][kMagnitudeBits], int lane) {
#pragma unroll
  for (int w = 0; w < Words; ++w) {
    uint32_t pairs[16], all[16];
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      uint4 x4 = s.dense[lane][4 * w + v];
      pairs[4 * v] = x4.x, pairs[4 * v + 1] = x4.y, pairs[4 * v + 2] = x4.z, pairs[4 * v + 3] = x4.w;
    }
    pairs_to_planes(pairs, all);
#pragma unroll
    for (int p = 0; p < kMagnitudeBits; ++p) planes[w][p] = all[p];
  }
}

// Every NaN counts as one magnitude above infinity, see `nan_key`.
template <bool kBFloat16, int Words>
__device__ void unify_nans(uint32_t (&planes)[Words][kMagnitudeBits]) {
  constexpr int kMantissaBits = kBFloat16 ? 7 : 10;
  uint32_t special[Words], any = 0;
#pragma unroll
  for (int w = 0; w < Words; ++w) {
    special[w] = ~0u;
#pragma unroll
    for (int p = kMantissaBits; p < kMagnitudeBits; ++p) special[w] &= planes[w][p];
    any |= special[w];
  }
  if (!any) return;
#pragma unroll
  for (int w = 0; w < Words; ++w) {
    uint32_t mantissa = 0;
#pragma unroll
    for (int p = 0; p < kMantissaBits; ++p) mantissa |= planes[w][p];
    uint32_t nan = special[w] & mantissa;
#pragma unroll
    for (int p = 0; p < kMantissaBits; ++p) planes[w][p] = p == 0 ? planes[w][p] | nan : planes[w][p] & ~nan;
  }
}

// Sets the bits of the `keep` largest nonzero magnitudes. take_ties(candidate, missing, kept): of these, which are equal,
// so many as well, or all.
template <int Words, class TakeTies>
__device__ void keep_largest(uint32_t const (&planes)[Words][kMagnitudeBits], int keep, uint32_t (&kept)[Words],
                             TakeTies&& take_ties) {
  uint32_t candidate[Words];  // magnitudes that agree with the keep-th largest in all planes so far
#pragma unroll
  for (int w = 0; w < Words; ++w) candidate[w] = ~0u, kept[w] = 0;
  int missing = keep;
  bool positive = false;  // the keep-th largest is not zero
#pragma unroll
  for (int p = kMagnitudeBits - 1; p >= 0; --p) {
    int count = 0;
#pragma unroll
    for (int w = 0; w < Words; ++w) count += __popc(candidate[w] & planes[w][p]);
    bool enough = count >= missing;
    uint32_t same = enough ? ~0u : 0;  // the bit of the keep-th largest
    positive |= enough;
    missing -= enough ? 0 : count;
#pragma unroll
    for (int w = 0; w < Words; ++w) {
      kept[w] |= candidate[w] & planes[w][p] & ~same;
      candidate[w] &= ~(planes[w][p] ^ same);
    }
  }
  if (positive) take_ties(candidate, missing, kept);
}
template <int Words>
__device__ void keep_largest(uint32_t const (&planes)[Words][kMagnitudeBits], int keep, uint32_t (&kept)[Words]) {
  keep_largest(planes, keep, kept, [](uint32_t const(&candidate)[Words], int missing, uint32_t (&kept)[Words]) {
#pragma unroll
    for (int w = 0; w < Words; ++w) {  // the lowest channels
      int count = __popc(candidate[w]);
      uint32_t rest = count <= missing ? 0 : candidate[w];
      for (int i = missing; rest && i > 0; --i) rest &= rest - 1;
      kept[w] |= candidate[w] ^ rest;
      missing = max(missing - count, 0);
    }
  });
}

// A lane's token in registers: the next rows may arrive.
template <int Words>
struct TokenRow {
  static constexpr int kVectors = SelectStorage<Words>::kVectors;
  uint4 vectors[kVectors];

  __device__ TokenRow(SelectStorage<Words> const& s, int lane) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vectors[v] = s.dense[lane][v];
  }
};

// What a narrow codec needs besides the masks.
struct LaneScaling {
  float largest = 0;  // number of the codec
  bool has_nan = true;
  int64_t* refused = nullptr;  // counts what is kept and the codec cannot store

  LaneScaling() = default;
  LaneScaling(format::CodecId id, int64_t* refused) : refused(refused) {
    format::visit_codec(id, [&](auto codec) {
      if constexpr (decltype(codec)::kHasScales) largest = codec.kLargest, has_nan = codec.kHasNan;
    });
  }

  // The scale of a token whose values are `row`. per_channel: reciprocals of the channels' scales.
  template <int Words>
  __device__ uint16_t token_scale_of_row(uint16_t const* row, DType dtype, float const* per_channel,
                                         uint32_t const (&kept)[Words]) const {
    float most = 0;
    int not_stored = 0;
#pragma unroll
    for (int w = 0; w < Words; ++w) {
#pragma unroll 1
      for (uint32_t bits = kept[w]; bits; bits &= bits - 1) {
        int channel = 32 * w + __ffs(bits) - 1;
        float x = fabsf(from_half_bits(row[channel], dtype));
        if (x < INFINITY)
          most = fmaxf(most, x * per_channel[channel]);
        else if (!has_nan || x == INFINITY)
          ++not_stored;
      }
    }
    count(not_stored);
    return format::token_scale(most, largest);
  }

  // Of what a token keeps, what is neither infinite nor NaN; counts what the codec cannot store. planes: with NaN unified.
  template <bool kBFloat16, int Words>
  __device__ void keep_finite(uint32_t const (&planes)[Words][kMagnitudeBits], uint32_t const (&kept)[Words],
                              uint32_t (&finite)[Words]) const {
    constexpr int kMantissaBits = kBFloat16 ? 7 : 10;
    int not_stored = 0;
#pragma unroll
    for (int w = 0; w < Words; ++w) {
      uint32_t special = kept[w];
#pragma unroll
      for (int p = kMantissaBits; p < kMagnitudeBits; ++p) special &= planes[w][p];
      not_stored += __popc(has_nan ? special & ~planes[w][0] : special);
      finite[w] = kept[w] & ~special;
    }
    count(not_stored);
  }

  // As token_scale_of_row, in less time. per_channel: in shared memory.
  template <bool kBFloat16, int Words>
  __device__ uint16_t token_scale(TokenRow<Words> const& row, float4 const* per_channel,
                                  uint32_t const (&finite)[Words]) const {
    using X = std::conditional_t<kBFloat16, bfloat16_t, half_t>;
    constexpr int kQuad = 4;
    float most = 0;
#pragma unroll
    for (int w = 0; w < Words; ++w) {
#pragma unroll
      for (int quad = 0; quad < 32 / kQuad; ++quad) {
        auto const* x = reinterpret_cast<X const*>(row.vectors) + 32 * w + kQuad * quad;
        float4 scale = per_channel[32 / kQuad * w + quad];
        float const per[] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          float ratio = fabsf(float(x[i])) * per[i];
          if (finite[w] >> (kQuad * quad + i) & 1) most = fmaxf(most, ratio);
        }
      }
    }
    return format::token_scale(most, largest);
  }

 private:
  __device__ void count(int not_stored) const {
    if (not_stored)
      atomicAdd(reinterpret_cast<unsigned long long*>(refused), static_cast<unsigned long long>(not_stored));
  }
};

}  // namespace cute_kernels::compress
