// What is kept of caches by the rules of two of four. As select_tile.hpp: a warp takes half a tile and a lane a token, whose
// magnitudes are bit planes.
#include "cute_kernels/compress/select_tile.hpp"
#include "cute_kernels/compress/slots.hpp"
#include "cute_kernels/format/group_order.hpp"

namespace cute_kernels::compress {
namespace {

template <int HeadDim>
constexpr int kKeyBits = HeadDim < kGroup * 32 ? HeadDim / kGroup : 32;  // of a word of a mask of keys
template <Role kRole, int HeadDim>
constexpr int kPlaneWords = kRole == Role::kKey ? kMaskWords<HeadDim> : HeadDim / 32;

// What a token's masks are for: blocks of at most two of four, or of the bitmap format, which holds every pattern.
enum class Masks { kSlots, kBitmap };

template <Role kRole, int HeadDim, Masks kMasks>
struct SlotSelectStorage {
  SelectStorage<HeadDim / 32> rows[kHalves];
  alignas(16) uint8_t channel[kMaskWords<HeadDim> * 32];  // by bit of a mask: 32 w + l
  uint32_t of_class[kClasses][kMaskWords<HeadDim>];       // bits of a mask of values
};
template <Role kRole, int HeadDim>
struct SlotSelectStorage<kRole, HeadDim, Masks::kBitmap> {
  SelectStorage<HeadDim / 32> rows[kHalves];
  alignas(16) uint8_t channel[kMaskWords<HeadDim> * 32];  // as above
  alignas(16) float per_channel[HeadDim];                 // by channel
  uint32_t tokens_kept[kHalves][HeadDim];                 // by channel, a bit each
};

// The magnitudes of the lane's token, in the order of its mask.
template <Role kRole, int HeadDim, Masks kMasks>
__device__ void read_mask_planes(SlotSelectStorage<kRole, HeadDim, kMasks> const& s, int half, int lane,
                                 uint32_t (&planes)[kPlaneWords<kRole, HeadDim>][kMagnitudeBits]) {
  if constexpr (kRole == Role::kValue) {
    read_planes(s.rows[half], planes, lane);
  } else {
    uint32_t row = cute::cast_smem_ptr_to_uint(s.rows[half].dense[lane]);
#pragma unroll
    for (int w = 0; w < kPlaneWords<kRole, HeadDim>; ++w) {
      auto const* channels = reinterpret_cast<uint32_t const*>(s.channel + 32 * w);
      uint32_t all[16];
      auto value = [&](int i) {
        if (i >= kKeyBits<HeadDim>) return 0u;
        // Twice byte i % 4 further on than the row, in one instruction.
        return ptx::load_shared_u16(__dp4a(channels[i / 4], uint32_t{sizeof(uint16_t)} << 8 * (i % 4), row));
      };
      values_to_planes(value, all);
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

// Takes of the keys' `candidate` bits, which are not in the order of channels, those of the `missing` lowest channels.
template <int Words>
__device__ void take_lowest_channels(uint8_t const* channel_of_bit, uint32_t (&candidate)[Words], int missing,
                                     uint32_t (&kept)[Words]) {
  int count = 0;
#pragma unroll
  for (int w = 0; w < Words; ++w) count += __popc(candidate[w]);
#pragma unroll 1
  for (int excess = count - missing; excess > 0; --excess) {
    int last = -1, last_bit = 0;
#pragma unroll
    for (int w = 0; w < Words; ++w) {
#pragma unroll 1
      for (uint32_t bits = candidate[w]; bits; bits &= bits - 1) {
        int bit = 32 * w + __ffs(bits) - 1;
        if (channel_of_bit[bit] > last) last = channel_of_bit[bit], last_bit = bit;
      }
    }
#pragma unroll
    for (int w = 0; w < Words; ++w) candidate[w] &= ~(last_bit / 32 == w ? 1u << last_bit % 32 : 0u);
  }
#pragma unroll
  for (int w = 0; w < Words; ++w) kept[w] |= candidate[w];
}

template <int Words>
__device__ int count_nonzeros(uint32_t const (&planes)[Words][kMagnitudeBits]) {
  int count = 0;
#pragma unroll
  for (int w = 0; w < Words; ++w) {
    uint32_t nonzero = 0;
#pragma unroll
    for (int plane = 0; plane < kMagnitudeBits; ++plane) nonzero |= planes[w][plane];
    count += __popc(nonzero);
  }
  return count;
}

// Of a lane's token.
template <int Words>
struct Kept {
  uint32_t bits[Words] = {}, finite[Words];
  int beyond = 0;  // nonzeros beyond two of four
  int lost = 0;    // what magnitude alone would keep and is not kept, if asked for
};

// counts_lost: `lost` is asked for; counts_beyond: `beyond`.
template <Role kRole, int Words>
__device__ Kept<Words> keep_of_token(uint32_t (&planes)[Words][kMagnitudeBits], DType dtype, int keep, bool counts_lost,
                                     bool counts_beyond, LaneScaling const& scaling, uint8_t const* channel_of_bit,
                                     int lane) {
  if (dtype == DType::kBFloat16)
    unify_nans<true>(planes);
  else
    unify_nans<false>(planes);
  auto take_ties = [&](uint32_t (&candidate)[Words], int missing, uint32_t (&kept)[Words]) {
    take_lowest_channels(channel_of_bit, candidate, missing, kept);
  };
  Kept<Words> result;
  uint32_t largest[Words];
#pragma unroll 1
  for (int is_last = counts_lost ? 0 : 1; is_last < 2; ++is_last) {
    if (is_last) {
#pragma unroll
      for (int w = 0; w < Words; ++w) largest[w] = result.bits[w];
      if (counts_beyond) result.beyond = count_nonzeros(planes);
      keep_candidates<kRole>(planes, lane);
      if (counts_beyond) result.beyond -= count_nonzeros(planes);
    }
    if constexpr (kRole == Role::kKey)
      keep_largest(planes, most_kept(keep), result.bits, take_ties);
    else
      keep_largest(planes, most_kept(keep), result.bits);
  }
#pragma unroll
  for (int w = 0; w < Words; ++w) result.lost += __popc(largest[w] & ~result.bits[w]);
  if (scaling.largest > 0) {
    if (dtype == DType::kBFloat16)
      scaling.keep_finite<true>(planes, result.bits, result.finite);
    else
      scaling.keep_finite<false>(planes, result.bits, result.finite);
  }
  return result;
}

constexpr int kThreads = 32 * kHalves;

// A warp's half of a tile, whose rows are on their way.
template <int HeadDim>
struct HalfTile {
  unsigned head;
  int half, lane;
  int64_t token;  // of the lane, in all tiles

  template <class Storage>
  __device__ HalfTile(Storage& s, DenseView const& x, bool vectors, unsigned tiles_per_head)
      : head(blockIdx.x / tiles_per_head),
        half(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        token(int64_t{blockIdx.x} * kTileTokens + threadIdx.x) {
    int64_t first = int64_t{blockIdx.x % tiles_per_head} * kTileTokens + half * kHalfTokens;
    int tokens = static_cast<int>(max(int64_t{0}, min(int64_t{kHalfTokens}, x.tokens - first)));
    start_rows(s.rows[half], x.row(head, tokens ? first : 0), x.stride_token, x.head_dim, tokens, vectors, lane);
  }
};

// f(position, channel, bit of a mask) for every position.
template <Role kRole, int HeadDim, class F>
__device__ void for_each_position(uint8_t const* channel_order, unsigned head, F&& f) {
#pragma unroll
  for (int position = threadIdx.x; position < HeadDim; position += kThreads) {
    int channel = channel_order[head * HeadDim + position], group = position / kGroup;
    int bit = kRole == Role::kKey ? 32 * (group / 32 * kGroup + position % kGroup) + group % 32 : channel;
    f(position, channel, bit);
  }
}

// Masks for blocks of at most two of four, a token's words together, and what every class keeps.
template <Role kRole, int HeadDim>
__global__ void __launch_bounds__(kThreads)
    select_slots_kernel(DenseView x, bool vectors, SlotSelection p, LaneScaling scaling, unsigned tiles_per_head) {
  constexpr int kWords = kPlaneWords<kRole, HeadDim>, kAllWords = kMaskWords<HeadDim>;
  __shared__ SlotSelectStorage<kRole, HeadDim, Masks::kSlots> s;
  HalfTile<HeadDim> tile(s, x, vectors, tiles_per_head);
  int half = tile.half, lane = tile.lane;
  if constexpr (kRole == Role::kValue) {
    for (int i = threadIdx.x; i < kClasses * kAllWords; i += kThreads) s.of_class[i / kAllWords][i % kAllWords] = 0;
    __syncthreads();
  }
  for_each_position<kRole, HeadDim>(p.channel_order, tile.head, [&](int position, int channel, int bit) {
    s.channel[bit] = static_cast<uint8_t>(channel);
    if constexpr (kRole == Role::kValue) atomicOr(&s.of_class[position % kClasses][bit / 32], 1u << bit % 32);
  });
  cute::cp_async_wait<0>();
  __syncthreads();

  uint32_t planes[kWords][kMagnitudeBits];
  read_mask_planes(s, half, lane, planes);
  auto kept = keep_of_token<kRole>(planes, x.dtype, p.keep, p.constrained, p.keep == 0, scaling, s.channel, lane);
  int stored = 0;
#pragma unroll
  for (int w = 0; w < kAllWords; ++w) {
    p.masks[tile.token * kAllWords + w] = w < kWords ? kept.bits[w] : 0;
    if (w < kWords) stored += __popc(kept.bits[w]);
  }
  uint32_t counts[2] = {};  // a byte a class
  auto count_class = [&](int c, auto&& bits_of) {
    uint32_t n = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) n += __popc(kept.bits[w] & bits_of(w));
    counts[c / 4] |= n << 8 * (c % 4);
  };
  // A group of keys has the class of its number, and a bit of that number in each of four words.
  constexpr int kKeyClasses = slot_classes(SlotTile::Packed<Fp8Codec>::kStreams);
  constexpr uint32_t kOfFirstClass = ~0u / ((1u << kKeyClasses) - 1);
#pragma unroll
  for (int c = 0; c < (kRole == Role::kKey ? kKeyClasses : kClasses); ++c) {
    if constexpr (kRole == Role::kKey)
      count_class(c, [&](int) { return kOfFirstClass << c; });
    else
      count_class(c, [&](int w) { return s.of_class[c][w]; });
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
    of_tiles[tile.token] = make_uint2(counts[0], counts[1]);
  else if (lane % kGroup == 0)
    of_tiles[tile.token / kGroup] = make_uint2(counts[0], counts[1]);
  add_to(p.totals, stored);
  add_to(p.totals + 2, kept.beyond);
  if (p.constrained) add_to(p.constrained, kept.lost);
}

// Masks and counts for the bitmap format, as `select` writes them.
template <Role kRole, int HeadDim>
__global__ void __launch_bounds__(kThreads)
    select_two_of_four_kernel(DenseView x, bool vectors, uint8_t const* channel_order, int keep, uint32_t* masks,
                              int32_t* counts, TokenScaling of_tokens, LaneScaling scaling, unsigned tiles_per_head) {
  constexpr int kWords = kPlaneWords<kRole, HeadDim>, kChannelWords = HeadDim / 32;
  __shared__ SlotSelectStorage<kRole, HeadDim, Masks::kBitmap> s;
  HalfTile<HeadDim> tile(s, x, vectors, tiles_per_head);
  int half = tile.half, lane = tile.lane;
  for_each_position<kRole, HeadDim>(channel_order, tile.head, [&](int position, int channel, int bit) {
    s.channel[bit] = static_cast<uint8_t>(channel);
    if (of_tokens.token_scale)  // each of the head's channels once
      s.per_channel[position] = 1 / scale_value(of_tokens.channel_scale[tile.head * HeadDim + position]);
  });
  cute::cp_async_wait<0>();
  __syncthreads();

  uint32_t planes[kWords][kMagnitudeBits];
  read_mask_planes(s, half, lane, planes);
  auto kept = keep_of_token<kRole>(planes, x.dtype, keep, false, false, scaling, s.channel, lane);
  // The lanes' bits by channel, in the words of `select`.
  auto by_channel = [&](uint32_t const(&bits)[kWords], uint32_t (&words)[kChannelWords]) {
    if constexpr (kRole == Role::kValue) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) words[w] = transpose_lanes(bits[w], lane);
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32_t of_channel = transpose_lanes(bits[w], lane);
        if (lane < kKeyBits<HeadDim>) s.tokens_kept[half][s.channel[32 * w + lane]] = of_channel;
      }
      __syncwarp();
#pragma unroll
      for (int w = 0; w < kChannelWords; ++w) words[w] = s.tokens_kept[half][32 * w + lane];
      __syncwarp();
    }
  };
  uint32_t words[kChannelWords];
  by_channel(kept.bits, words);
#pragma unroll
  for (int w = 0; w < kChannelWords; ++w) {
    masks[((int64_t{blockIdx.x} * kHalves + half) * kChannelWords + w) * 32 + lane] = words[w];
    if (words[w]) atomicAdd(counts + (int64_t{tile.head} * kChannelWords + w) * 32 + lane, __popc(words[w]));
  }
  if (!of_tokens.token_scale) return;
  bool special = false;
#pragma unroll
  for (int w = 0; w < kWords; ++w) special |= kept.bits[w] != kept.finite[w];
  if (__any_sync(~0u, special)) by_channel(kept.finite, words);
  uint32_t finite[kChannelWords];  // of the lane's token
#pragma unroll
  for (int w = 0; w < kChannelWords; ++w) finite[w] = transpose_lanes(words[w], lane);
  TokenRow<kChannelWords> row(s.rows[half], lane);
  auto const* per_channel = reinterpret_cast<float4 const*>(s.per_channel);
  of_tokens.token_scale[tile.token] = x.dtype == DType::kBFloat16
                                          ? scaling.token_scale<true>(row, per_channel, finite)
                                          : scaling.token_scale<false>(row, per_channel, finite);
}

unsigned tiles_of_head(DenseView const& x) { return static_cast<unsigned>((x.tokens + kTileTokens - 1) / kTileTokens); }

}  // namespace

SlotScratch slot_scratch(Role role, int padded_head_dim) {
  SlotScratch scratch{};
  visit_head_dim(padded_head_dim, [&](auto head_dim) { scratch.mask_words = kTileTokens * kMaskWords<head_dim()>; });
  scratch.count_bytes = role == Role::kKey ? sizeof(SlotCounts::keys) : sizeof(SlotCounts::values);
  return scratch;
}

void select_slots(DenseView const& x, Role role, CodecId codec, SlotSelection const& selection, cudaStream_t stream) {
  visit_narrow_codec(codec, [](auto of) { static_assert(SlotTile::Packed<decltype(of)>::kStreams == 1); });
  LaneScaling scaling(codec, selection.totals + 1);
  visit_head_dim(padded_head_dim(x.head_dim), [&](auto head_dim) {
    auto* kernel = role == Role::kKey ? select_slots_kernel<Role::kKey, head_dim()>
                                      : select_slots_kernel<Role::kValue, head_dim()>;
    launch_tiles(kernel, int64_t{x.batch} * x.kv_heads * tiles_of_head(x), kThreads, 0, stream,
                 "launch of select_slots", x, x.has_vectors(), selection, scaling, tiles_of_head(x));
  });
}

void select_two_of_four(DenseView const& x, Role role, uint8_t const* channel_order, int keep, uint32_t* masks,
                        int32_t* counts, TokenScaling const& of_tokens, cudaStream_t stream) {
  prepare_selection(x, of_tokens, counts, stream);
  LaneScaling scaling(of_tokens.codec, of_tokens.refused);
  visit_head_dim(padded_head_dim(x.head_dim), [&](auto head_dim) {
    auto* kernel = role == Role::kKey ? select_two_of_four_kernel<Role::kKey, head_dim()>
                                      : select_two_of_four_kernel<Role::kValue, head_dim()>;
    launch_tiles(kernel, int64_t{x.batch} * x.kv_heads * tiles_of_head(x), kThreads, 0, stream,
                 "launch of select_two_of_four", x, x.has_vectors(), channel_order, keep, masks, counts, of_tokens,
                 scaling, tiles_of_head(x));
  });
}

}  // namespace cute_kernels::compress
