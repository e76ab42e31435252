// What is kept of caches by rule "magnitude-2of4", and how much in every class. As select_tile.hpp: a warp takes half a tile
// and a lane a token, whose magnitudes are bit planes.
#include "cute_kernels/compress/select_tile.hpp"
#include "cute_kernels/compress/slots.hpp"
#include "cute_kernels/format/group_order.hpp"

namespace cute_kernels::compress {
namespace {

template <Role kRole, int HeadDim>
constexpr int kPlaneWords = kRole == Role::kKey ? kMaskWords<HeadDim> : HeadDim / 32;

template <Role kRole, int HeadDim>
struct SlotSelectStorage {
  SelectStorage<HeadDim / 32> rows[kHalves];
  alignas(16) uint8_t channel[kMaskWords<HeadDim> * 32];  // by bit of a mask: 32 w + l
  float per_channel[HeadDim];                             // by channel
  uint32_t of_class[kClasses][kMaskWords<HeadDim>];       // bits of a mask
};

template <class Storage>
__device__ uint16_t const* row_of(Storage const& s, int half, int lane) {
  return reinterpret_cast<uint16_t const*>(s.rows[half].dense[lane]);
}

// The magnitudes of the lane's token, in the order of its mask.
template <Role kRole, int HeadDim>
__device__ void read_mask_planes(SlotSelectStorage<kRole, HeadDim> const& s, int half, int lane,
                                 uint32_t (&planes)[kPlaneWords<kRole, HeadDim>][kMagnitudeBits]) {
  if constexpr (kRole == Role::kValue) {
    read_planes(s.rows[half], planes, lane);
  } else {
    uint16_t const* row = row_of(s, half, lane);
#pragma unroll
    for (int w = 0; w < kPlaneWords<kRole, HeadDim>; ++w) {
      uint32_t pairs[16], all[16];
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        constexpr int kBits = HeadDim < 4 * 32 ? HeadDim / kGroup : 32;  // of a word
        uint32_t channels = *reinterpret_cast<uint32_t const*>(s.channel + 32 * w + 2 * i);
        auto element = [&](int j) { return uint32_t{row[channels >> 8 * j & 0xff]}; };
        pairs[i] = 2 * i < kBits ? element(0) | element(1) << 16 : 0;
        pairs[i + 1] = 2 * i < kBits ? element(2) | element(3) << 16 : 0;
      }
      to_planes(pairs, all);
#pragma unroll
      for (int p = 0; p < kMagnitudeBits; ++p) planes[w][p] = all[p];
    }
  }
}

// Bits where `other` is larger than `own`; equal: what they have then.
template <class Other>
__device__ uint32_t is_larger(Other&& other, uint32_t const (&own)[kMagnitudeBits], uint32_t equal) {
  uint32_t larger = equal;
#pragma unroll
  for (int p = 0; p < kMagnitudeBits; ++p) {  // the highest plane in which they differ decides
    uint32_t bits = other(p);
    larger = (bits & ~own[p]) | (larger & ~(bits ^ own[p]));
  }
  return larger;
}

__device__ uint32_t at_least_two(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | (a & c) | (b & c); }

// Makes zeros of magnitudes that are not among the two largest of their group, ties to the first.
template <Role kRole, int Words>
__device__ void keep_candidates(uint32_t (&planes)[Words][kMagnitudeBits], int lane) {
  auto clear = [&](int w, uint32_t bits) {
#pragma unroll
    for (int p = 0; p < kMagnitudeBits; ++p) planes[w][p] &= ~bits;
  };
  if constexpr (kRole == Role::kKey) {
#pragma unroll
    for (int first = 0; first < Words; first += kGroup) {
      // Whether word b beats word a, which comes before it; if not, a beats b.
      auto beats = [&](int b, int a) {
        return is_larger([&](int p) { return planes[first + b][p]; }, planes[first + a], 0u);
      };
      uint32_t b10 = beats(1, 0), b20 = beats(2, 0), b30 = beats(3, 0), b21 = beats(2, 1), b31 = beats(3, 1),
               b32 = beats(3, 2);
      clear(first, at_least_two(b10, b20, b30));
      clear(first + 1, at_least_two(~b10, b21, b31));
      clear(first + 2, at_least_two(~b20, ~b21, b32));
      clear(first + 3, at_least_two(~b30, ~b31, ~b32));
    }
  } else {
#pragma unroll
    for (int w = 0; w < Words; ++w) {
      uint32_t beaten[kGroup - 1];
#pragma unroll
      for (int x = 1; x < kGroup; ++x)
        beaten[x - 1] = is_larger([&](int p) { return __shfl_xor_sync(~0u, planes[w][p], x); }, planes[w],
                                  (lane ^ x) < lane ? ~0u : 0u);
      clear(w, at_least_two(beaten[0], beaten[1], beaten[2]));
    }
  }
}

template <Role kRole, int HeadDim>
__global__ void __launch_bounds__(32 * kHalves)
    select_slots_kernel(DenseView x, bool vectors, SlotSelection p, unsigned tiles_per_head) {
  constexpr int kWords = kPlaneWords<kRole, HeadDim>, kAllWords = kMaskWords<HeadDim>;
  __shared__ SlotSelectStorage<kRole, HeadDim> s;
  unsigned head = blockIdx.x / tiles_per_head;
  int half = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t first_token = int64_t{blockIdx.x % tiles_per_head} * kTileTokens + half * kHalfTokens;
  int tokens = static_cast<int>(max(int64_t{0}, min(int64_t{kHalfTokens}, x.tokens - first_token)));
  bool has_scales = p.codec_largest > 0;
  start_rows(s.rows[half], x.row(head, tokens ? first_token : 0), x.stride_token, x.head_dim, tokens, vectors, lane);
  for (int i = threadIdx.x; i < kClasses * kAllWords; i += blockDim.x) s.of_class[i / kAllWords][i % kAllWords] = 0;
  for (int i = threadIdx.x; i < kAllWords * 32; i += blockDim.x) s.channel[i] = 0;
  __syncthreads();
  for (int position = threadIdx.x; position < HeadDim; position += blockDim.x) {
    int channel = p.channel_order[head * HeadDim + position], group = position / kGroup;
    int bit = kRole == Role::kKey ? 32 * (group / 32 * kGroup + position % kGroup) + group % 32 : channel;
    int of_class = kRole == Role::kKey ? group % (kGroup * p.streams) : position % kClasses;
    s.channel[bit] = static_cast<uint8_t>(channel);
    atomicOr(&s.of_class[of_class][bit / 32], 1u << bit % 32);
    if (has_scales) s.per_channel[position] = 1 / scale_value(p.channel_scale[head * HeadDim + position]);
  }
  cute::cp_async_wait<0>();
  __syncthreads();

  uint32_t planes[kWords][kMagnitudeBits], kept[kWords] = {}, largest[kWords];
  // Of keys bits are not in the order of channels.
  auto take_ties = [&](uint32_t (&candidate)[kWords], int missing, uint32_t (&kept)[kWords]) {
    int count = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) count += __popc(candidate[w]);
#pragma unroll 1
    for (int excess = count - missing; excess > 0; --excess) {
      int last = -1, last_bit = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
#pragma unroll 1
        for (uint32_t bits = candidate[w]; bits; bits &= bits - 1) {
          int bit = 32 * w + __ffs(bits) - 1;
          if (s.channel[bit] > last) last = s.channel[bit], last_bit = bit;
        }
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) candidate[w] &= ~(last_bit / 32 == w ? 1u << last_bit % 32 : 0u);
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) kept[w] |= candidate[w];
  };
  auto count_nonzeros = [&] {
    int count = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t nonzero = 0;
#pragma unroll
      for (int plane = 0; plane < kMagnitudeBits; ++plane) nonzero |= planes[w][plane];
      count += __popc(nonzero);
    }
    return count;
  };
  read_mask_planes(s, half, lane, planes);
  if (x.dtype == DType::kBFloat16)
    unify_nans<true>(planes);
  else
    unify_nans<false>(planes);
  // What magnitude alone would keep, where somebody asks for that, then what is kept.
  int beyond = 0;
#pragma unroll 1
  for (int is_last = p.constrained ? 0 : 1; is_last < 2; ++is_last) {
    if (is_last) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) largest[w] = kept[w];
      beyond = count_nonzeros();
      keep_candidates<kRole>(planes, lane);
      beyond -= count_nonzeros();
    }
    if constexpr (kRole == Role::kKey)
      keep_largest(planes, most_kept(p.keep), kept, take_ties);
    else
      keep_largest(planes, most_kept(p.keep), kept);
  }

  int stored = 0, lost = 0, refused = 0;
  int64_t token = int64_t{blockIdx.x} * kTileTokens + threadIdx.x;
#pragma unroll
  for (int w = 0; w < kAllWords; ++w) {
    p.masks[token * kAllWords + w] = w < kWords ? kept[w] : 0;
    if (w >= kWords) continue;
    stored += __popc(kept[w]);
    lost += __popc(largest[w] & ~kept[w]);
  }
  uint32_t counts[2] = {};  // a byte a class
#pragma unroll
  for (int c = 0; c < kClasses; ++c) {
    uint32_t n = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) n += __popc(kept[w] & s.of_class[c][w]);
    counts[c / 4] |= n << 8 * (c % 4);
  }
  if constexpr (kRole == Role::kValue) {  // of four tokens
#pragma unroll
    for (int step = 1; step < kGroup; step *= 2) {
      counts[0] += __shfl_xor_sync(~0u, counts[0], step);
      counts[1] += __shfl_xor_sync(~0u, counts[1], step);
    }
  }
  auto* of_tiles = reinterpret_cast<uint2*>(p.counts);
  if (kRole == Role::kKey)
    of_tiles[token] = make_uint2(counts[0], counts[1]);
  else if (lane % kGroup == 0)
    of_tiles[token / kGroup] = make_uint2(counts[0], counts[1]);

  if (has_scales) {
    uint16_t const* row = row_of(s, half, lane);
    float most = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll 1
      for (uint32_t bits = kept[w]; bits; bits &= bits - 1) {
        int channel = s.channel[32 * w + __ffs(bits) - 1];
        float magnitude = fabsf(from_half_bits(row[channel], x.dtype));
        if (magnitude < INFINITY)
          most = fmaxf(most, magnitude * s.per_channel[channel]);
        else
          refused += !p.has_nan || magnitude == INFINITY;
      }
    }
    p.token_scale[token] = token_scale(most, p.codec_largest);
  }
  add_to(p.totals, stored);
  add_to(p.totals + 1, refused);
  add_to(p.totals + 2, beyond);
  if (p.constrained) add_to(p.constrained, lost);
}

}  // namespace

SlotScratch slot_scratch(Role role, int padded_head_dim) {
  SlotScratch scratch{};
  visit_head_dim(padded_head_dim, [&](auto head_dim) { scratch.mask_words = kTileTokens * kMaskWords<head_dim()>; });
  scratch.count_bytes = role == Role::kKey ? sizeof(SlotCounts::keys) : sizeof(SlotCounts::values);
  return scratch;
}

void select_slots(DenseView const& x, Role role, CodecId codec, SlotSelection selection, cudaStream_t stream) {
  visit_narrow_codec(codec, [&](auto of) {
    using Codec = decltype(of);
    selection.streams = SlotTile::Packed<Codec>::kStreams;
    selection.codec_largest = Codec::kLargest;
    selection.has_nan = Codec::kHasNan;
  });
  unsigned tiles_per_head = static_cast<unsigned>((x.tokens + kTileTokens - 1) / kTileTokens);
  visit_head_dim(padded_head_dim(x.head_dim), [&](auto head_dim) {
    auto* kernel = role == Role::kKey ? select_slots_kernel<Role::kKey, head_dim()>
                                      : select_slots_kernel<Role::kValue, head_dim()>;
    launch_tiles(kernel, int64_t{x.batch} * x.kv_heads * tiles_per_head, 32 * kHalves, 0, stream,
                 "launch of select_slots", x, x.has_vectors(), selection, tiles_per_head);
  });
}

}  // namespace cute_kernels::compress
