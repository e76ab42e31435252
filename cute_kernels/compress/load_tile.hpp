// What a tile is packed from, on its way to shared memory: values, bits and scales; and codes that are made of values.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/pointer.hpp>
#include <type_traits>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/compress/encode.hpp"
#include "cute_kernels/compress/select_tile.hpp"

namespace cute_kernels::compress {

using namespace format;

inline constexpr int kStreams = TileFormat::kStreams;
inline constexpr int kSwizzledRows = 8;

constexpr int warps_of(int head_dim) { return head_dim == kMaxHeadDim ? 4 : 2; }

// A base of what follows for narrow codecs: reciprocals of the scales, by channel and by token position.
template <int HeadDim, bool kScales>
struct PackScales {};
template <int HeadDim>
struct PackScales<HeadDim, true> {
  alignas(16) float per_channel[HeadDim];
  float per_token[kTileTokens];
  uint16_t channel_scale[HeadDim], token_scale[kTileTokens];  // scratch of `append`: by channel, by token
};

// kCodes: the dense tile is of codes, a byte each, rather than of values.
template <int HeadDim, bool kScales = false, bool kCodes_ = false>
struct PackStorage : PackScales<HeadDim, kScales> {
  static constexpr int kWarps = warps_of(HeadDim);
  static constexpr bool kCodes = kCodes_;
  using Element = std::conditional_t<kCodes, uint8_t, uint16_t>;

  alignas(16) uint32_t bits[kTileTokens][HeadDim / 32];    // by token and channel position
  alignas(16) uint8_t channel[HeadDim];                    // by position
  uint32_t lengths[kWarps][kLanes];                        // of the streams, 16 bits each
  alignas(kRowBytes) Element dense[kTileTokens][HeadDim];  // by token position and channel, see `swizzled`
  alignas(kRowBytes) uint16_t values[][kLanes][kStreams];  // staged value rows
};

// Where a channel is in a row of the dense tile. Rows start in the same bank, and lanes of different rows often read
// the same channel: within 8 rows its vector is in 8 different banks.
__device__ constexpr int swizzled(int row, int channel) { return channel ^ (row % kSwizzledRows) * kVectorValues; }

// What a tile is packed from. Pointers may be to shared memory.
struct TileSource {
  uint16_t const* rows;  // its first token
  int64_t stride_token;
  int tokens, head_dim;   // that exist
  bool vectors;           // see DenseView
  uint32_t const* masks;  // as `balance` writes them; null: they and the channel order are in the storage already
  uint8_t const* channel_order;
  uint8_t const* token_order;
  DType dtype = DType::kFloat16;
  uint16_t const* channel_scale = nullptr;  // of a narrow codec: by channel position
  uint16_t const* token_scale = nullptr;    // by token
};

// Starts to copy what `balance` made.
template <class Storage>
__device__ void load_bits(Storage& s, TileSource const& x) {
  constexpr int kHeadDim = sizeof(s.channel), kThreads = 32 * Storage::kWarps, kBitVectors = sizeof(s.bits) / 16;
  int thread = threadIdx.x % kThreads;
  for (int i = thread; i < kBitVectors; i += kThreads)
    ptx::cp_async_16(cute::cast_smem_ptr_to_uint(&s.bits[0][0] + 4 * i), x.masks + 4 * i, 16);
  if (thread < kHeadDim / 16)
    ptx::cp_async_16(cute::cast_smem_ptr_to_uint(s.channel + 16 * thread), x.channel_order + 16 * thread, 16);
}

template <int HeadDim, bool kScales>
__device__ void load_tile(PackStorage<HeadDim, kScales>& s, TileSource const& x) {
  constexpr int kThreads = 32 * warps_of(HeadDim), kRowVectors = HeadDim / kVectorValues;
  constexpr int kVectors = kTileTokens * kRowVectors / kThreads, kRowStep = kThreads / kRowVectors;
  static_assert(kThreads % kRowVectors == 0, "a thread stays in its column of vectors");
  int thread = threadIdx.x % kThreads, column = thread % kRowVectors, first_row = thread / kRowVectors;
  unsigned token[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) token[i] = x.token_order[first_row + i * kRowStep];

  if (x.masks) load_bits(s, x);
  cute::cp_async_fence();
  if (!x.vectors) {
    for (int row = 0; row < kTileTokens; ++row)
      for (int c = thread; x.token_order[row] < x.tokens && c < x.head_dim; c += kThreads)
        s.dense[row][swizzled(row, c)] = x.rows[x.token_order[row] * x.stride_token + c];
    cute::cp_async_fence();
    return;
  }
  unsigned tokens = column * kVectorValues < x.head_dim ? x.tokens : 0;  // that this column has
  unsigned stride = static_cast<unsigned>(x.stride_token * sizeof(uint16_t));
  auto const* source = reinterpret_cast<uint8_t const*>(x.rows + column * kVectorValues);
  uint32_t target = cute::cast_smem_ptr_to_uint(s.dense[first_row]);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    int column_at = swizzled(first_row + i * kRowStep, column * kVectorValues);
    ptx::cp_async_16(target + (i * kRowStep * HeadDim + column_at) * sizeof(uint16_t),
                     source + uint64_t{token[i]} * stride, token[i] < tokens ? 16 : 0);
  }
  cute::cp_async_fence();
}

// The reciprocals of the scales; and the scales of the tokens where the block has them. channel_order: has arrived.
template <class Storage>
__device__ void load_scales(Storage& s, TileSource const& x, uint8_t const* channel_order, uint32_t* block) {
  constexpr int kHeadDim = sizeof(s.channel), kThreads = 32 * Storage::kWarps;
  int thread = threadIdx.x % kThreads;
#pragma unroll
  for (int p = thread; p < kHeadDim; p += kThreads)
    s.per_channel[channel_order[p]] = 1 / scale_value(x.channel_scale[p]);
  auto* row = reinterpret_cast<uint16_t*>(block + TileFormat::bitmap_rows(kHeadDim) * kLanes);
  for (int p = thread; p < kTileTokens; p += kThreads) {
    uint16_t scale = x.token_scale[x.token_order[p]];
    s.per_token[p] = 1 / scale_value(scale);
    row[scale_index(p)] = scale;
  }
}

// The codes of a vector of X.
template <class Codec, class X>
__device__ void encode_vector(uint4 const& vector, float const (&per_channel)[kVectorValues], float per_token,
                              uint32_t (&codes)[kVectorValues / 4]) {
  auto const* x = reinterpret_cast<X const*>(&vector);
#pragma unroll
  for (int i = 0; i < kVectorValues; i += 4) {
    float scaled[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) scaled[j] = scaled_down(float(x[i + j]), per_channel[i + j], per_token);
    codes[i / 4] = encode_four<Codec>(scaled);
  }
}

// A thread's vectors of a tile, all in the same channels.
template <class Storage>
struct TileVectors {
  static constexpr int kHeadDim = sizeof(Storage::channel), kThreads = 32 * Storage::kWarps;
  static constexpr int kRowVectors = kHeadDim / kVectorValues, kRowStep = kThreads / kRowVectors;
  static constexpr int kVectors = kTileTokens / kRowStep;
  static_assert(kThreads % kRowVectors == 0, "a thread stays in its column of vectors");

  int channel, first_row;
  uint4 vectors[kVectors];

  __device__ TileVectors() {
    int thread = threadIdx.x % kThreads;
    channel = thread % kRowVectors * kVectorValues;
    first_row = thread / kRowVectors;
  }

  // Of the dense cache, with zeros for tokens and channels that are not there: those of [kFirst, kLast).
  template <int kFirst, int kLast>
  __device__ void load(TileSource const& x) {
    unsigned token[kVectors];
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) token[i] = x.token_order[first_row + i * kRowStep];
    unsigned tokens = channel < x.head_dim ? x.tokens : 0;  // that these channels have
    if (x.vectors && tokens == kTileTokens) {
      unsigned stride = static_cast<unsigned>(x.stride_token * sizeof(uint16_t));
      auto const* from = reinterpret_cast<uint8_t const*>(x.rows + channel);
#pragma unroll
      for (int i = kFirst; i < kLast; ++i)
        vectors[i] = *reinterpret_cast<uint4 const*>(from + uint64_t{token[i]} * stride);
      return;
    }
#pragma unroll
    for (int i = kFirst; i < kLast; ++i) {
      alignas(16) uint16_t values[kVectorValues] = {};
      uint16_t const* from = x.rows + token[i] * x.stride_token + channel;
#pragma unroll
      for (int j = 0; j < kVectorValues; ++j)
        if (token[i] < tokens) values[j] = from[j];
      vectors[i] = *reinterpret_cast<uint4 const*>(values);
    }
  }

  // Writes their codes to the dense tile.
  template <class Codec, int kFirst, int kLast>
  __device__ void encode(Storage& s, DType dtype) const {
    float per_channel[kVectorValues];
#pragma unroll
    for (int i = 0; i < kVectorValues; i += 4)
      *reinterpret_cast<float4*>(per_channel + i) = *reinterpret_cast<float4 const*>(s.per_channel + channel + i);
    constexpr int kRowsApart = 2 * kRowStep;  // rows of every other vector, which are swizzled alike
    static_assert(kRowsApart % kSwizzledRows == 0);
    uint8_t* target[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int row = first_row + i * kRowStep;
      target[i] = &s.dense[row][swizzled(row, channel)];
    }
    visit_dtype(dtype, [&](auto type) {
      using X = decltype(type);
      if constexpr (sizeof(X) == sizeof(uint16_t)) {
#pragma unroll
        for (int i = kFirst; i < kLast; ++i) {
          uint32_t codes[kVectorValues / 4];
          encode_vector<Codec, X>(vectors[i], per_channel, s.per_token[first_row + i * kRowStep], codes);
          *reinterpret_cast<uint2*>(target[i % 2] + i / 2 * kRowsApart * kHeadDim) = make_uint2(codes[0], codes[1]);
        }
      }
    });
  }
};

// The dense tile becomes its codes, 16 bits each, kept or not.
template <class Codec, int HeadDim>
__device__ void encode_tile(PackStorage<HeadDim, true>& s, DType dtype) {
  constexpr int kThreads = 32 * warps_of(HeadDim), kRowVectors = HeadDim / kVectorValues;
  constexpr int kRowStep = kThreads / kRowVectors;
  int thread = threadIdx.x % kThreads, column = thread % kRowVectors * kVectorValues;
  float per_channel[kVectorValues];
#pragma unroll
  for (int i = 0; i < kVectorValues; ++i) per_channel[i] = s.per_channel[column + i];
  visit_dtype(dtype, [&](auto type) {
    using X = decltype(type);
    if constexpr (sizeof(X) == sizeof(uint16_t)) {
#pragma unroll 4
      for (int row = thread / kRowVectors; row < kTileTokens; row += kRowStep) {
        auto& vector = *reinterpret_cast<uint4*>(&s.dense[row][swizzled(row, column)]);
        uint4 values = vector;
        uint32_t codes[kVectorValues / 4];
        encode_vector<Codec, X>(values, per_channel, s.per_token[row], codes);
        vector = make_uint4(ptx::permute_bytes(codes[0], 0, 0x4140), ptx::permute_bytes(codes[0], 0, 0x4342),
                            ptx::permute_bytes(codes[1], 0, 0x4140), ptx::permute_bytes(codes[1], 0, 0x4342));
      }
    }
  });
}

}  // namespace cute_kernels::compress
