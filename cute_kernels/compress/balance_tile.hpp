// The token order of a tile, found by one warp: the algorithm of format/token_order.hpp. A quad of lanes holds a group,
// two tokens a lane; the eight lanes of two paired groups split their 64 possible swaps.
//
// The masks come from `select` as words of 32 tokens, channel by channel. They become rows of channels, both in
// position order, for `pack`.
#pragma once

#include "cute_kernels/compress/bits.hpp"
#include "cute_kernels/compress/select_tile.hpp"
#include "cute_kernels/format/token_order.hpp"

namespace cute_kernels::compress {

using namespace format;

inline constexpr uint32_t kAllLanes = ~0u;
inline constexpr int kLaneTokens = 2;
inline constexpr int kLaneGroup = 4;  // lanes of a group
// Of a token in a tile, and of a swap: a member of the one group, one of the other.
inline constexpr int kIndexBits = 6;
static_assert(kTokenGroups * kLaneGroup == 32 && kLaneGroup * kLaneTokens == kGroupTokens, "a lane holds two tokens");
static_assert(kTokenGroups == kClasses, "a row of channels and the groups of tokens are split alike");

// Of a lane's token.
__device__ constexpr int position_of(int lane, int j) {
  return lane / kLaneGroup + kTokenGroups * (kLaneTokens * (lane % kLaneGroup) + j);
}

// Words as of 8 classes: counts four a word, loads two a word.
inline constexpr int kCountWords = kClasses / 4;
inline constexpr int kLoadWords = kClasses / 2;
inline constexpr int kRatioBase = 12;  // a multiple of every scale

// A token, as lanes exchange it between groups.
template <int Caches>
struct Token {
  uint32_t count[Caches * kCountWords];  // scaled
  int norm;                              // its sum of squares << kIndexBits, and the token
};

// This lane's row of 32 Words channels by position, for each half of the tile's tokens.
template <int Words>
__device__ void load_rows(uint32_t (&rows)[kHalves][Words], uint32_t const* masks, uint8_t const* channel_order,
                          int lane) {
#pragma unroll
  for (int w = 0; w < Words; ++w) {
    int channel = channel_order[32 * w + lane];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) rows[h][w] = masks[h * 32 * Words + channel];
  }
#pragma unroll
  for (int h = 0; h < kHalves; ++h)
#pragma unroll
    for (int w = 0; w < Words; ++w) rows[h][w] = transpose_lanes(rows[h][w], lane);
}

// Nonzeros of a row in every class: its positions of one residue mod 8. Words are interleaved first, so that a class
// of up to four words is counted at once.
template <int Words>
__device__ void count_classes(uint32_t const* row, int (&count)[kClasses]) {
#pragma unroll
  for (int c = 0; c < kClasses; ++c) count[c] = 0;
#pragma unroll
  for (int w = 0; w < Words; w += 4) {
    uint32_t nibbles[2][2];  // [pair of words][classes 0..3, 4..7]
#pragma unroll
    for (int i = 0; i < 2 && w + 2 * i < Words; ++i) {
      uint32_t a = row[w + 2 * i], b = row[w + 2 * i + 1];
      nibbles[i][0] = ptx::blend(a, b << 4, 0x0f0f0f0fu);
      nibbles[i][1] = ptx::blend(a >> 4, b, 0x0f0f0f0fu);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (Words == 2) {
#pragma unroll
        for (int c = 0; c < 4; ++c) count[4 * n + c] += __popc(nibbles[0][n] & 0x11111111u << c);
      } else {
        uint32_t a = nibbles[0][n], b = nibbles[1][n];
        uint32_t low = ptx::blend(a, b << 2, 0x33333333u), high = ptx::blend(a >> 2, b, 0x33333333u);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          count[4 * n + c] += __popc(low & 0x55555555u << c);
          count[4 * n + c + 2] += __popc(high & 0x55555555u << c);
        }
      }
    }
  }
}

// The scaled counts of this lane's tokens of one cache, and 12 / scale of every class, four bits each.
template <int Words, int Caches>
__device__ uint32_t scale_counts(uint32_t const (*rows)[Words], int lane,
                                 uint32_t (&scaled)[kLaneTokens][kCountWords]) {
  int count[kLaneTokens][kClasses], scale[kClasses], most = 0;
#pragma unroll
  for (int j = 0; j < kLaneTokens; ++j) count_classes<Words>(rows[position_of(lane, j)], count[j]);
#pragma unroll
  for (int c = 0; c < kClasses; c += 2) {
    uint32_t pair = count[0][c] + count[1][c] + ((count[0][c + 1] + count[1][c + 1]) << 16);
    pair = __reduce_add_sync(kAllLanes, pair);
    scale[c] = pair & 0xffff, scale[c + 1] = pair >> 16;
    most = max(most, max(scale[c], scale[c + 1]));
  }
  uint32_t ratios = 0;
#pragma unroll
  for (int c = 0; c < kClasses; ++c) {
    scale[c] = class_scale(scale[c], most, Caches);
    ratios |= (0x346c0u >> 4 * scale[c] & 15) << 4 * c;  // 12, 6, 4, 3
  }
#pragma unroll
  for (int j = 0; j < kLaneTokens; ++j)
#pragma unroll
    for (int i = 0; i < kCountWords; ++i) {
      uint32_t word = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) word += count[j][4 * i + c] * (scale[4 * i + c] << 8 * c);
      scaled[j][i] = word;
    }
  return ratios;
}

// Two counts of a word as a load word.
__device__ inline uint32_t low_counts(uint32_t counts) { return ptx::permute_bytes(counts, 0, 0x4140); }
__device__ inline uint32_t high_counts(uint32_t counts) { return ptx::permute_bytes(counts, 0, 0x4342); }

template <int Caches>
__device__ void add_counts(uint32_t (&load)[Caches * kLoadWords], uint32_t const (&plus)[Caches * kCountWords],
                           uint32_t const (&minus)[Caches * kCountWords]) {
#pragma unroll
  for (int i = 0; i < Caches * kCountWords; ++i) {
    load[2 * i] += low_counts(plus[i]) - low_counts(minus[i]);
    load[2 * i + 1] += high_counts(plus[i]) - high_counts(minus[i]);
  }
}

// The best swap of this lane's group with the one it is paired with, if any helps; `load` is the group's.
template <int Caches>
__device__ void exchange_tokens(Token<Caches> (&mine)[kLaneTokens], uint32_t (&load)[Caches * kLoadWords], int pattern,
                                int lane) {
  constexpr int kCounts = Caches * kCountWords;
  int other_lane = lane ^ (pattern * kLaneGroup);
  bool is_first = lane < other_lane;

  // A swap of x and y changes half the sum of squares by u(x) + u(y) - 2 x.y, where u(t) is |t|^2 plus t times what
  // the other group's load is above its own.
  int key[kLaneTokens];  // u << 6, and which member of its group the token is, in the bits of its group
#pragma unroll
  for (int j = 0; j < kLaneTokens; ++j) {
    int member = kLaneTokens * (lane % kLaneGroup) + j;
    key[j] = (mine[j].norm & -(1 << kIndexBits)) | (is_first ? member * kGroupTokens : member);
  }
  int along[kLaneTokens] = {};
#pragma unroll
  for (int i = 0; i < Caches * kLoadWords; ++i) {
    uint32_t above = __shfl_sync(kAllLanes, load[i], other_lane) - load[i];
    above += (above & 0x8000u) << 1;  // what the lower half borrowed from the upper one
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j)
      along[j] = i % 2 ? ptx::dot2_high(above, mine[j].count[i / 2], along[j])
                       : ptx::dot2_low(above, mine[j].count[i / 2], along[j]);
  }
#pragma unroll
  for (int j = 0; j < kLaneTokens; ++j) key[j] += along[j] << kIndexBits;

  // Lane pairs of the two groups: the first group's lane looks at two of its four, the second's at the other two.
  int best = INT32_MAX;
#pragma unroll
  for (int n = 0; n < kLaneGroup / 2; ++n) {
    int from = other_lane ^ (is_first ? n : n + kLaneGroup / 2);
#pragma unroll
    for (int k = 0; k < kLaneTokens; ++k) {
      uint32_t count[kCounts];
#pragma unroll
      for (int i = 0; i < kCounts; ++i) count[i] = __shfl_sync(kAllLanes, mine[k].count[i], from);
      int other_key = __shfl_sync(kAllLanes, key[k], from);
#pragma unroll
      for (int j = 0; j < kLaneTokens; ++j) {
        uint32_t dot = 0;
#pragma unroll
        for (int i = 0; i < kCounts; ++i) dot = __dp4a(mine[j].count[i], count[i], dot);
        best = min(best, key[j] + other_key - static_cast<int>(dot << (kIndexBits + 1)));
      }
    }
  }
  best = min(best, __shfl_xor_sync(kAllLanes, best, 1));
  best = min(best, __shfl_xor_sync(kAllLanes, best, 2));
  best = min(best, __shfl_sync(kAllLanes, best, other_lane));

  int first = best >> 3 & (kGroupTokens - 1), second = best & (kGroupTokens - 1);
  int leaving = is_first ? first : second, entering = is_first ? second : first;
  int home = lane & -kLaneGroup, other_home = other_lane & -kLaneGroup;
  Token<Caches> out, in;
  bool upper = leaving % kLaneTokens;
#pragma unroll
  for (int i = 0; i < kCounts; ++i) {
    uint32_t given = upper ? mine[1].count[i] : mine[0].count[i];
    out.count[i] = __shfl_sync(kAllLanes, given, home | leaving / kLaneTokens);
    in.count[i] = __shfl_sync(kAllLanes, given, other_home | entering / kLaneTokens);
  }
  in.norm = __shfl_sync(kAllLanes, upper ? mine[1].norm : mine[0].norm, other_home | entering / kLaneTokens);
  if (best >= 0) return;  // no swap helps these two groups
  add_counts<Caches>(load, in.count, out.count);
  if (lane % kLaneGroup != leaving / kLaneTokens) return;
  if (upper)
    mine[1] = in;
  else
    mine[0] = in;
}

// The longest of the group's streams in one cache, from the scaled loads.
__device__ inline int longest_stream(uint32_t const* load, uint32_t ratios) {
  uint32_t most = 0;
#pragma unroll
  for (int c = 0; c < kClasses; ++c) most = max(most, (load[c / 2] >> 16 * (c % 2) & 0xffff) * (ratios >> 4 * c & 15));
  return static_cast<int>(__reduce_max_sync(kAllLanes, most) / kRatioBase);
}

template <int Words, int Caches>
struct BalanceStorage {
  uint32_t rows[Caches][kTileTokens][Words];
};

// One tile of a cache. Its masks are those of `select`; balancing rewrites them as rows in position order.
struct TileMasks {
  uint32_t* masks;
  uint8_t const* channel_order;
};

// Streams may be of any length.
struct NoFit {
  template <int Caches>
  __device__ void operator()(Token<Caches> (&)[kLaneTokens], uint32_t const*, uint32_t const*, int (&)[Caches],
                             int) const {}
};

// Of one cache: the tile's rows of channels, which may take the place of its masks, and the scaled counts of this lane's
// tokens in the order of memory. Returns ratios as scale_counts.
template <int Words, int Caches>
__device__ uint32_t count_tokens(uint32_t (&to)[kTileTokens][Words], TileMasks const& cache, int lane,
                                 uint32_t (&scaled)[kLaneTokens][kCountWords]) {
  uint32_t rows[kHalves][Words];
  load_rows<Words>(rows, cache.masks, cache.channel_order, lane);
  __syncwarp();
#pragma unroll
  for (int h = 0; h < kHalves; ++h)
#pragma unroll
    for (int w = 0; w < Words; ++w) to[32 * h + lane][w] = rows[h][w];
  __syncwarp();
  return scale_counts<Words, Caches>(to, lane, scaled);
}

// Tokens whose counts are there.
template <int Caches>
__device__ void begin_order(Token<Caches> (&mine)[kLaneTokens], int lane) {
#pragma unroll
  for (int j = 0; j < kLaneTokens; ++j) {
    uint32_t norm = 0;
#pragma unroll
    for (int i = 0; i < Caches * kCountWords; ++i) norm = __dp4a(mine[j].count[i], mine[j].count[i], norm);
    mine[j].norm =
        static_cast<int>(norm << kIndexBits) | position_of(lane, j);  // the first order is that of the tokens
  }
}

// The loads of this lane's group.
template <int Caches>
__device__ void add_loads(Token<Caches> const (&mine)[kLaneTokens], uint32_t (&load)[Caches * kLoadWords]) {
#pragma unroll
  for (int i = 0; i < Caches * kCountWords; ++i) {
    load[2 * i] = low_counts(mine[0].count[i]) + low_counts(mine[1].count[i]);
    load[2 * i + 1] = high_counts(mine[0].count[i]) + high_counts(mine[1].count[i]);
  }
#pragma unroll
  for (int i = 0; i < Caches * kLoadWords; ++i)
#pragma unroll
    for (int step = 1; step < kLaneGroup; step *= 2) load[i] += __shfl_xor_sync(kAllLanes, load[i], step);
}

template <int Caches>
__device__ void exchange_in_rounds(Token<Caches> (&mine)[kLaneTokens], uint32_t (&load)[Caches * kLoadWords], int first,
                                   int last, int lane) {
#pragma unroll 1
  for (int round = first; round < last; ++round) exchange_tokens<Caches>(mine, load, round_pattern(round), lane);
}

// The order that the rounds have found, and every cache's rows in position order; kInPlace: where they were.
// fit(mine, load, ratios, longest, lane) may change the order and the longest streams.
template <bool kInPlace, int Words, int Caches, class Fit>
__device__ void write_order(BalanceStorage<Words, Caches> const& s, uint32_t* const (&rows)[Caches],
                            Token<Caches> (&mine)[kLaneTokens], uint32_t const (&load)[Caches * kLoadWords],
                            uint32_t const (&ratios)[Caches], Fit const& fit, uint8_t* token_order,
                            int (&longest)[Caches], int lane) {
#pragma unroll
  for (int o = 0; o < Caches; ++o) longest[o] = longest_stream(load + o * kLoadWords, ratios[o]);
  fit(mine, load, ratios, longest, lane);

#pragma unroll
  for (int o = 0; o < Caches; ++o) {
    uint2 row[kLaneTokens][Words / 2];
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      int token = mine[j].norm & (kTileTokens - 1);
      if (o == 0) token_order[position_of(lane, j)] = static_cast<uint8_t>(token);
#pragma unroll
      for (int w = 0; w < Words; w += 2) row[j][w / 2] = *reinterpret_cast<uint2 const*>(&s.rows[o][token][w]);
    }
    if constexpr (kInPlace) __syncwarp();
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j)
#pragma unroll
      for (int w = 0; w < Words; w += 2)
        *reinterpret_cast<uint2*>(rows[o] + position_of(lane, j) * Words + w) = row[j][w / 2];
  }
}

// A warp's work on a tile, or on a pair of tiles that share their token order: all of the above.
template <int Words, int Caches, class Fit>
__device__ void balance_tile(BalanceStorage<Words, Caches>& s, TileMasks const (&caches)[Caches], Fit const& fit,
                             uint8_t* token_order, int (&longest)[Caches], int lane) {
  Token<Caches> mine[kLaneTokens];
  uint32_t ratios[Caches], load[Caches * kLoadWords], *rows[Caches];
#pragma unroll
  for (int o = 0; o < Caches; ++o) {
    uint32_t scaled[kLaneTokens][kCountWords];
    ratios[o] = count_tokens<Words, Caches>(s.rows[o], caches[o], lane, scaled);
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j)
#pragma unroll
      for (int i = 0; i < kCountWords; ++i) mine[j].count[o * kCountWords + i] = scaled[j][i];
  }
  begin_order<Caches>(mine, lane);
  add_loads<Caches>(mine, load);
  exchange_in_rounds<Caches>(mine, load, 0, token_rounds(Caches), lane);
#pragma unroll
  for (int o = 0; o < Caches; ++o) rows[o] = caches[o].masks;
  write_order<false>(s, rows, mine, load, ratios, fit, token_order, longest, lane);
}

}  // namespace cute_kernels::compress
