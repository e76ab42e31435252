// Tiles of at most two of four, from dense rows and back; one CTA a tile.
//
// Compression takes three kernels: one selects what is kept and counts it, one orders the tokens of every tile, and, when
// it is known where tiles begin, one writes their blocks. A warp takes whole atoms of a tile there, and a lane its slots of
// them, as the MMA kernels do. Narrow codecs only.
#include "cute_kernels/compress/group_tile.hpp"
#include "cute_kernels/compress/load_tile.hpp"
#include "cute_kernels/compress/select_tile.hpp"
#include "cute_kernels/format/group_order.hpp"

namespace cute_kernels::compress {
namespace {

using Tile = TwoOfFourBitmapTile;

constexpr int kGroup = Tile::kGroup, kKept = Tile::kKept, kAtomSlots = kKept * Tile::kAtomGroups;

// f(codec) with a narrow one.
template <class F>
void visit_narrow_codec(CodecId id, F&& f) {
  visit_codec(id, [&](auto codec) {
    if constexpr (decltype(codec)::kIsNarrow)
      f(codec);
    else
      throw std::runtime_error(std::string("there are no CUDA kernels for codec ") + codec.kName +
                               " in the tile format " + Tile::kName);
  });
}

// ---- Selection -------------------------------------------------------------------------------------------------------
//
// As select_tile.hpp: a warp takes half a tile and a lane a token, whose magnitudes are bit planes.

// A token's mask. Of keys bit l of word 4 j + i is the channel at position 4 (32 j + l) + i, so that a group has one bit of
// four words; of values bit l of word e is channel 32 e + l.
template <int HeadDim>
constexpr int kMaskWords = HeadDim / 32 < kGroup ? kGroup : HeadDim / 32;
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

// ---- Order -----------------------------------------------------------------------------------------------------------

constexpr int kOrderWarps = 4;

struct OrderStorage {
  SlotCounts counts;
  uint8_t order[kTileTokens], group_at[kTileGroups];
  int load[kClasses][kClasses];
};

// The pair-th number whose bit `bit` is 0.
__device__ int without_bit(int pair, int bit) { return (pair >> bit << (bit + 1)) | (pair & ((1 << bit) - 1)); }

// Whether this lane has the least change of its segment of `lanes`, of equal ones the first, and one below 0.
__device__ bool is_best(int change, int lanes) {
  int lane = threadIdx.x % 32, first = lane / lanes * lanes, best = change;
  for (int step = 1; step < lanes; step *= 2) best = min(best, __shfl_xor_sync(~0u, best, step));
  uint32_t equal = __ballot_sync(~0u, change == best) >> first;
  return change < 0 && change == best && (equal & ((1u << (lane - first)) - 1)) == 0;
}

// As choose_group_places and choose_tokens_of_groups (format/group_order.hpp), a lane a candidate; every pair's best lane
// makes the swap.
__device__ void choose_group_places(OrderStorage& s, int classes) {
  int lane = threadIdx.x % 32, places = kTileGroups / classes, candidates = places * places;
  int pair = lane / candidates, x = lane % candidates / places, y = lane % places;
#pragma unroll 1
  for (int round = 0; round < kGroupRounds * (classes - 1); ++round) {
    int pattern = round % (classes - 1) + 1;
    int a = without_bit(pair, 31 - __clz(pattern)), b = a ^ pattern, change = 0;
    bool is_pair = a < classes;
    int from = a + x * classes, to = b + y * classes;
    if (is_pair)
      change = change_of_swap(s.counts.values[s.group_at[from]], s.counts.values[s.group_at[to]], s.load[a], s.load[b]);
    if (is_best(change, candidates)) {
      uint8_t of_a = s.group_at[from], of_b = s.group_at[to];
      move_load(s.counts.values[of_a], s.counts.values[of_b], s.load[a], s.load[b]);
      s.group_at[from] = of_b, s.group_at[to] = of_a;
    }
    __syncwarp();
  }
}
__device__ void choose_tokens_of_groups(OrderStorage& s) {
  constexpr int kHalves = kClasses / kFour, kCandidates = kTileGroups / kHalves;
  int lane = threadIdx.x % 32, pair = lane / kCandidates, half = pair / 2;
  uint8_t* of_group = s.order + kFour * (half + kHalves * (lane % kCandidates));
#pragma unroll 1
  for (int round = 0; round < kGroupRounds * (kFour - 1); ++round) {
    int pattern = round % (kFour - 1) + 1, a = without_bit(pair % 2, 31 - __clz(pattern)), b = a ^ pattern;
    int (&load_a)[kClasses] = s.load[kFour * half + a], (&load_b)[kClasses] = s.load[kFour * half + b];
    uint8_t x = of_group[a], y = of_group[b];
    if (is_best(change_of_swap(s.counts.keys[x], s.counts.keys[y], load_a, load_b), kCandidates)) {
      move_load(s.counts.keys[x], s.counts.keys[y], load_a, load_b);
      of_group[a] = y, of_group[b] = x;
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(32 * kOrderWarps)
    order_slots_kernel(SlotOrder keys, SlotOrder values, int64_t tiles, uint8_t* token_order) {
  __shared__ OrderStorage storage[kOrderWarps];
  OrderStorage& s = storage[threadIdx.x / 32];
  int lane = threadIdx.x % 32;
  int64_t tile = int64_t{blockIdx.x} * kOrderWarps + threadIdx.x / 32;
  if (tile >= tiles) return;
  auto load_counts = [&](uint8_t* to, uint8_t const* from, int count) {
    for (int i = lane; i < count / 4; i += 32)
      reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<uint32_t const*>(from)[i];
  };
  if (keys.counts) load_counts(s.counts.keys[0], keys.counts + tile * sizeof(s.counts.keys), sizeof(s.counts.keys));
  if (values.counts)
    load_counts(s.counts.values[0], values.counts + tile * sizeof(s.counts.values), sizeof(s.counts.values));
  if (lane < kTileGroups) s.group_at[lane] = static_cast<uint8_t>(lane);
  __syncwarp();
  // load_of(row of loads, class)
  auto sum_loads = [&](auto&& load_of) {
    for (int i = lane; i < kClasses * kClasses; i += 32)
      s.load[i / kClasses][i % kClasses] = load_of(i / kClasses, i % kClasses);
    __syncwarp();
  };
  auto longest = [&] {
    int most = 0;
    for (int i = lane; i < kClasses * kClasses; i += 32) most = max(most, s.load[i / kClasses][i % kClasses]);
    most = __reduce_max_sync(~0u, most);
    __syncwarp();
    return most;
  };
  if (values.counts) {
    int classes = slot_classes(values.streams);
    sum_loads([&](int column, int c) {
      int load = 0;
      for (int q = column; column < classes && q < kTileGroups; q += classes) load += s.counts.values[q][c];
      return load;
    });
    choose_group_places(s, classes);
    int most = longest();
    if (lane == 0) values.longest[tile] = most;
  }
  for (int p = lane; p < kTileTokens; p += 32)
    s.order[p] = static_cast<uint8_t>(kFour * s.group_at[p / kFour] + p % kFour);
  __syncwarp();
  if (keys.counts) {
    sum_loads([&](int row, int c) {
      int load = 0;
      for (int p = row; p < kTileTokens; p += kClasses) load += s.counts.keys[s.order[p]][c];
      return load;
    });
    choose_tokens_of_groups(s);
    int most = longest();
    if (lane == 0) keys.longest[tile] = most;
  }
  if (lane < kTileTokens / 4)
    reinterpret_cast<uint32_t*>(token_order + tile * kTileTokens)[lane] =
        reinterpret_cast<uint32_t const*>(s.order)[lane];
}

// ---- Blocks ----------------------------------------------------------------------------------------------------------

// Where a lane's group is.
template <int HeadDim>
struct RolePlace {
  bool is_key;
  int token, channel;  // positions of its first element

  __device__ RolePlace(bool is_key, int lane, int group) : is_key(is_key) {
    int first = is_key ? Tile::element_layout<Role::kKey, HeadDim>()(lane, kGroup * group)
                       : Tile::element_layout<Role::kValue, HeadDim>()(lane, kGroup * group);
    token = first / HeadDim, channel = first % HeadDim;
  }
  __device__ int token_of(int i) const { return is_key ? token : token + i; }
  __device__ int channel_of(int i) const { return is_key ? channel + i : channel; }
};

// Bits of a bitmap word that are of its first `atoms` atoms.
template <class Codec>
__device__ uint32_t bits_of_atoms(int atoms) {
  auto first = [](int atoms) constexpr {
    uint32_t bits = 0;
    for (int slot = 0; slot < kAtomSlots * atoms; ++slot) bits |= 1u << Tile::bitmap_bit<Codec>(slot);
    return bits;
  };
  constexpr uint32_t k1 = first(1), k2 = first(2), k3 = first(3);
  return atoms == 0 ? 0 : atoms == 1 ? k1 : atoms == 2 ? k2 : k3;
}

// The rank of an atom's first value in its lane's stream. word(i): of the lane.
template <class Codec, class Word>
__device__ int first_rank(int atom, Word&& word) {
  int rank = __popc(word(atom / 4) & bits_of_atoms<Codec>(atom % 4));
  for (int i = 0; i < atom / 4; ++i) rank += __popc(word(i));
  return rank;
}

template <int HeadDim>
struct SlotPackStorage : DenseRows<HeadDim> {
  uint32_t masks[kTileTokens][kMaskWords<HeadDim>];
  uint8_t token[kTileTokens];                          // by position
  float per_channel[HeadDim], per_token[kTileTokens];  // by position
  uint32_t bitmap[Tile::bitmap_rows(HeadDim)][kLanes];
  uint2 atoms[Tile::lane_slots(HeadDim) / kAtomSlots][kLanes];   // codes of an atom's slots, a byte each
  alignas(16) uint8_t codes[Tile::lane_slots(HeadDim)][kLanes];  // those that are stored, by rank
};

// Streams longer than `most` lose the values of least magnitude, of equal ones the later: a lane a stream. With all warps.
template <class Codec, int HeadDim>
__device__ void trim(SlotPackStorage<HeadDim>& s, int most, int64_t* dropped) {
  constexpr int kSlots = Tile::lane_slots(HeadDim);
  int lane = threadIdx.x % 32, excess = -most;
#pragma unroll
  for (int i = 0; i < Tile::bitmap_rows(HeadDim); ++i) excess += __popc(s.bitmap[i][lane]);
  excess = max(0, excess);
  if (!__any_sync(~0u, excess > 0)) return;  // the same in all warps
  __syncthreads();
  if (threadIdx.x < 32) {
#pragma unroll 1
    for (int i = 0; i < excess; ++i) {
      uint32_t least = ~0u;
      int at = 0;
#pragma unroll 1
      for (int slot = 0; slot < kSlots; ++slot) {
        if (!(s.bitmap[Tile::bitmap_word(slot)][lane] >> Tile::bitmap_bit<Codec>(slot) & 1)) continue;
        uint2 codes = s.atoms[slot / kAtomSlots][lane];
        uint32_t magnitude = Codec::magnitude((slot % 8 < 4 ? codes.x : codes.y) >> 8 * (slot % 4) & 0xff);
        if (magnitude <= least) least = magnitude, at = slot;
      }
      s.bitmap[Tile::bitmap_word(at)][lane] &= ~(1u << Tile::bitmap_bit<Codec>(at));
    }
    add_to(dropped, lane == 0);
    add_to(dropped + 1, excess);
  }
  __syncthreads();
}

template <int HeadDim, class Codec>
__global__ void __launch_bounds__(kGroupThreads)
    pack_slots_kernel(DenseView x, bool vectors, uint32_t const* masks, uint16_t const* token_scale,
                      int64_t const* totals, int64_t capacity, SparseView view, int32_t const* tile_rows,
                      int64_t* dropped) {
  using Packed = Tile::Packed<Codec>;
  constexpr int kAtoms = kWarpAtoms<HeadDim>, kWords = kMaskWords<HeadDim>;
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<SlotPackStorage<HeadDim>*>(shared);
  if (totals && *totals > capacity) return;
  TileLocation tile(view);
  bool is_key = view.role == Role::kKey;
  int lane = threadIdx.x % 32, first_atom = threadIdx.x / 32 * kAtoms;
  int value_rows = (tile_rows ? tile_rows[tile.index] : tile.rows) - Tile::first_value_row<Codec>(HeadDim);
  load_rows<HeadDim>(s, x, tile.head, tile.first_token, tile.tokens, vectors);
  for (int i = threadIdx.x; i < kTileTokens * kWords; i += kGroupThreads)
    s.masks[0][i] = masks[tile.index * kTileTokens * kWords + i];
  for (int i = threadIdx.x; i < Tile::bitmap_rows(HeadDim) * kLanes; i += kGroupThreads) s.bitmap[0][i] = 0;
  for (int i = threadIdx.x; i < min(Tile::lane_slots(HeadDim), value_rows * Codec::kWordValues) * kLanes / 16;
       i += kGroupThreads)
    reinterpret_cast<uint4*>(s.codes)[i] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < HeadDim; i += kGroupThreads) {
    s.channel[i] = view.channel_order[tile.head * HeadDim + i];
    s.per_channel[i] = 1 / scale_value(view.channel_scale[tile.head * HeadDim + i]);
  }
  for (int p = threadIdx.x; p < kTileTokens; p += kGroupThreads) {
    s.token[p] = view.token_order[tile.index * kTileTokens + p];
    uint16_t scale = token_scale[tile.index * kTileTokens + s.token[p]];
    s.per_token[p] = 1 / scale_value(scale);
    reinterpret_cast<uint16_t*>(tile.block + Tile::scale_row(HeadDim) * kLanes)[scale_index(p)] = scale;
  }
  __syncthreads();

  uint32_t nan = nan_key(view.dtype);
#pragma unroll 1
  for (int atom = first_atom; atom < first_atom + kAtoms; ++atom) {
    uint32_t metadata[2] = {}, bits = 0;  // metadata of groups 0 to 3 of the atom, and of 4 to 7
    float scaled[kAtomSlots];
#pragma unroll
    for (int r = 0; r < Tile::kAtomGroups; ++r) {
      RolePlace<HeadDim> place(is_key, lane, Tile::kAtomGroups * atom + r);
      uint32_t element[kGroup], keys[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        int token = s.token[place.token_of(i)], position = place.channel_of(i), channel = s.channel[position];
        uint32_t mask = is_key ? s.masks[token][position / 128 * kGroup + i] >> position / kGroup % 32
                               : s.masks[token][channel / 32] >> channel % 32;
        element[i] = s.element[token][channel];
        keys[i] = mask & 1 ? magnitude_key(static_cast<uint16_t>(element[i]), nan) : 0;
      }
      uint32_t two = two_largest(keys);
      metadata[r / 2] |= two << (4 * (lane % 4) + 16 * (r % 2));
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        int at = two >> (2 * i) & 3, slot = kKept * r + i;
        uint32_t value = at & 2 ? (at & 1 ? element[3] : element[2]) : (at & 1 ? element[1] : element[0]);
        uint32_t key = at & 2 ? (at & 1 ? keys[3] : keys[2]) : (at & 1 ? keys[1] : keys[0]);
        scaled[slot] = scaled_down(from_half_bits(static_cast<uint16_t>(value), view.dtype),
                                   s.per_channel[place.channel_of(at)], s.per_token[place.token_of(at)]);
        bits |= key ? 1u << Tile::bitmap_bit<Codec>(slot) : 0;
      }
    }
    uint32_t codes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const four[] = {scaled[4 * i], scaled[4 * i + 1], scaled[4 * i + 2], scaled[4 * i + 3]};
      codes[i] = encode_four<Codec>(four);
    }
    s.atoms[atom][lane] = make_uint2(codes[0], codes[1]);
    // An atom's bits lie as those of the word's first one, so many further on.
    atomicOr(&s.bitmap[atom / 4][lane], bits << Tile::bitmap_bit<Codec>(kAtomSlots * (atom % 4)));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      metadata[half] |= __shfl_xor_sync(~0u, metadata[half], 1);
      metadata[half] |= __shfl_xor_sync(~0u, metadata[half], 2);
    }
    if (lane % 4 / 2 == atom % 2) tile.block[atom / 2 * kLanes + lane] = lane % 2 ? metadata[1] : metadata[0];
  }
  __syncthreads();
  if (tile_rows) trim<Codec>(s, Packed::most_values(value_rows), dropped);
  for (int i = threadIdx.x; i < Tile::bitmap_rows(HeadDim) * kLanes; i += kGroupThreads)
    tile.block[Tile::metadata_rows(HeadDim) * kLanes + i] = s.bitmap[0][i];
#pragma unroll 1
  for (int atom = first_atom; atom < first_atom + kAtoms; ++atom) {
    uint32_t bits = s.bitmap[atom / 4][lane] >> Tile::bitmap_bit<Codec>(kAtomSlots * (atom % 4));
    uint2 codes = s.atoms[atom][lane];
    int rank = first_rank<Codec>(atom, [&](int i) { return s.bitmap[i][lane]; });
#pragma unroll
    for (int slot = 0; slot < kAtomSlots; ++slot)
      if (bits >> Tile::bitmap_bit<Codec>(slot) & 1)
        s.codes[rank++][lane] = static_cast<uint8_t>((slot < 4 ? codes.x : codes.y) >> 8 * (slot % 4));
  }
  __syncthreads();
  uint32_t* values = tile.block + Tile::first_value_row<Codec>(HeadDim) * kLanes;
  for (int row = threadIdx.x / 32; row < value_rows; row += kGroupWarps) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < Packed::kWordValues; ++i)
      word |= uint32_t{s.codes[row * Packed::kWordValues + i][lane]} << Packed::kValueBits * i;
    values[row * kLanes + lane] = word;
  }
}

template <int HeadDim, class Codec>
__global__ void __launch_bounds__(kGroupThreads) unpack_slots_kernel(SparseView view, uint16_t* out) {
  using Packed = Tile::Packed<Codec>;
  constexpr int kAtoms = kWarpAtoms<HeadDim>;
  constexpr int kVectors = (HeadDim + 8) / kGroupVectorValues;
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<DenseRows<HeadDim>*>(shared);
  TileLocation tile(view);
  bool is_key = view.role == Role::kKey;
  int lane = threadIdx.x % 32, first_atom = threadIdx.x / 32 * kAtoms;
  for (int i = threadIdx.x; i < kTileTokens * kVectors; i += kGroupThreads)
    reinterpret_cast<uint4*>(s.element)[i] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < HeadDim; i += kGroupThreads) s.channel[i] = view.channel_order[tile.head * HeadDim + i];
  __syncthreads();
  uint32_t const* values = tile.block + Tile::first_value_row<Codec>(HeadDim) * kLanes + lane;
  uint32_t const* bitmap = tile.block + Tile::metadata_rows(HeadDim) * kLanes + lane;
  uint8_t const* token_order = view.token_order + tile.index * kTileTokens;
  auto word_of = [&](int i) { return __ldg(bitmap + i * kLanes); };
#pragma unroll 1
  for (int atom = first_atom; atom < first_atom + kAtoms; ++atom) {
    uint32_t bits = word_of(atom / 4) >> Tile::bitmap_bit<Codec>(kAtomSlots * (atom % 4));
    int rank = first_rank<Codec>(atom, word_of);
#pragma unroll
    for (int r = 0; r < Tile::kAtomGroups; ++r) {
      RolePlace<HeadDim> place(is_key, lane, Tile::kAtomGroups * atom + r);
      int metadata_lane = lane / 4 * 4 + 2 * (atom % 2) + r / 2;  // as in the kernel above
      uint32_t kept = __ldg(tile.block + atom / 2 * kLanes + metadata_lane) >> (4 * (lane % 4) + 16 * (r % 2));
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        if (!(bits >> Tile::bitmap_bit<Codec>(kKept * r + i) & 1)) continue;
        int at = kept >> (2 * i) & 3, token = place.token_of(at), channel = place.channel_of(at);
        uint32_t code = Packed::extract(__ldg(values + Packed::value_row(0, rank) * kLanes), 0, rank);
        ++rank;
        float of_token = scale_value(view.token_scales(tile.block)[scale_index(token)]);
        float of_channel = scale_value(view.channel_scale[tile.head * HeadDim + channel]);
        s.element[token_order[token]][s.channel[channel]] =
            rounded_bits(scaled_up(Codec::number(code), of_token, of_channel, view.dtype), view.dtype);
      }
    }
  }
  __syncthreads();
  store_rows<HeadDim>(s, tile, view, out);
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
    selection.streams = Tile::Packed<Codec>::kStreams;
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

void order_slots(SlotOrder keys, CodecId key_codec, SlotOrder values, CodecId value_codec, int64_t tiles,
                 uint8_t* token_order, cudaStream_t stream) {
  auto streams = [](CodecId id) {
    return visit_codec(id, [](auto codec) { return Tile::Packed<decltype(codec)>::kStreams; });
  };
  keys.streams = streams(key_codec), values.streams = streams(value_codec);
  launch_tiles(order_slots_kernel, (tiles + kOrderWarps - 1) / kOrderWarps, 32 * kOrderWarps, 0, stream,
               "launch of order_slots", keys, values, tiles, token_order);
}

void pack_slots(DenseView const& x, uint32_t const* masks, uint16_t const* token_scale, int64_t const* totals,
                int64_t capacity, SparseView const& view, int32_t const* tile_rows, int64_t* dropped,
                cudaStream_t stream) {
  check_tile_format(view, Tile::kId, "pack_slots");
  visit_narrow_codec(view.codec, [&](auto codec) {
    visit_head_dim(view.padded_head_dim, [&](auto head_dim) {
      launch_tiles(pack_slots_kernel<head_dim(), decltype(codec)>, view.tiles(), kGroupThreads,
                   sizeof(SlotPackStorage<head_dim()>), stream, "launch of pack_slots", x, x.has_vectors(), masks,
                   token_scale, totals, capacity, view, tile_rows, dropped);
    });
  });
}

void unpack_slots(SparseView const& view, void* out, cudaStream_t stream) {
  check_tile_format(view, Tile::kId, "unpack_slots");
  visit_narrow_codec(view.codec, [&](auto codec) {
    visit_head_dim(view.padded_head_dim, [&](auto head_dim) {
      launch_tiles(unpack_slots_kernel<head_dim(), decltype(codec)>, view.tiles(), kGroupThreads,
                   sizeof(DenseRows<head_dim()>), stream, "launch of decompress", view, static_cast<uint16_t*>(out));
    });
  });
}

}  // namespace cute_kernels::compress
