// The portions in which `append` compresses a tile, and the part of a CTA that works on one cache's: selects, deals, orders
// and packs. What a portion finds is in the tile's Preparation; the steps of a portion pass their data to each other in
// shared memory.
#pragma once

#include <algorithm>

#include "cute_kernels/compress/deal_head.hpp"
#include "cute_kernels/compress/fit.hpp"
#include "cute_kernels/compress/pages.hpp"
#include "cute_kernels/compress/tile_kernel.hpp"
#include "cute_kernels/compress/trim.hpp"

namespace cute_kernels::compress {

constexpr int kCaches = 2;  // keys, values

// Arguments of the kernel, keys before values.
struct AppendArguments {
  DenseView x[kCaches];  // new tokens
  bool vectors[kCaches];
  SparseView views[kCaches];
  int keep[kCaches];  // as keep_largest takes it
  LaneScaling scaling[kCaches];
  SlotLimits limits;
  int64_t* dropped;
  int32_t* error;
  Windows windows;
  int32_t* lengths;
  int32_t const* sequences;
  Share share;
  int staged_rows;
  int part_bytes;  // shared memory of a part of the CTA
};

// What a call may have to do, in portions; those before kLeave can be done before the tile is due. Rounds: as many at a
// time as pair all groups once.
inline constexpr int kPortionRounds = kTokenGroups - 1;
static_assert(token_rounds(kCaches) % kPortionRounds == 0);
enum Portion : int {
  kSelect = 0,
  kCount,
  kFirstRounds,
  kOrder = kFirstRounds + token_rounds(kCaches) / kPortionRounds,
  kLeave,  // packs the tile and moves the window's other tokens
  kPortions
};

// What portions have found of a tile.
template <int Words>
struct alignas(16) Preparation {
  BalanceStorage<Words, kCaches> rows;  // masks, as selection writes them, then rows by token, then by position
  Token<kCaches> tokens[32][kLaneTokens];
  uint8_t token_order[kTileTokens];
  int64_t refused[kCaches];  // counted when the tile is stored: it may never be
  uint32_t ratios[kCaches];
  int longest[kCaches];
  uint16_t token_scale[kCaches][kTileTokens];

  __device__ uint32_t* masks(int cache) { return &rows.rows[cache][0][0]; }
};

template <int HeadDim, bool kNarrow>
struct AppendShape {
  using Packing = PackStorage<HeadDim, kNarrow>;
  static constexpr int kWords = HeadDim / 32;
  static constexpr int kPartThreads = 32 * warps_of(HeadDim);
  static constexpr int kThreads = kCaches * kPartThreads;
  static constexpr int kMinCtas = kNarrow || HeadDim == kMaxHeadDim ? 1 : 4;  // at a time on an SM
  using Selecting = SelectStorage<kWords>[kHalves];

  // Of a part: its PackStorage, whose dense tile and staged rows serve selection as scratch, and behind that a
  // Preparation.
  static constexpr int kPreparation = (sizeof(Packing) - sizeof(Packing::dense) + sizeof(Selecting) + 15) / 16 * 16;
  static constexpr int part_bytes(int staged_rows) {
    int packing = static_cast<int>(sizeof(Packing)) + staged_rows * kRowBytes;
    int preparing = kPreparation + static_cast<int>(sizeof(Preparation<kWords>));
    return (std::max(packing, preparing) + kRowBytes - 1) / kRowBytes * kRowBytes;
  }
};

// Shared by both parts.
struct AppendShared {
  uint8_t token_order[kTileTokens];
  int longest[kCaches];
};

// The part of the CTA that works on one cache's tile: selects, deals, and packs.
template <int HeadDim, bool kNarrow>
struct AppendPart {
  using Shape = AppendShape<HeadDim, kNarrow>;

  AppendArguments const& a;
  typename Shape::Packing& s;
  Preparation<Shape::kWords>& preparation;
  int cache;
  PartOfCta<Shape::kPartThreads> part{cache};
  int thread = threadIdx.x % Shape::kPartThreads;

  // The scales of the sequence's channels, by channel; chosen now, if its channels are dealt, by the tile.
  __device__ void scale_channels(uint16_t const* tile, uint8_t const* order_of_head, uint16_t const* of_head,
                                 bool deals) {
    if (!deals) {
      for (int p = thread; p < HeadDim; p += Shape::kPartThreads)
        s.per_channel[order_of_head[p]] = 1 / scale_value(of_head[p]);
      return part.sync();
    }
    DenseView const& x = a.x[cache];
    uint32_t& most = *reinterpret_cast<uint32_t*>(&s.dense);
    if (thread == 0) most = 0;
    part.sync();
    for (int c = thread; c < HeadDim; c += Shape::kPartThreads) {
      ChannelSum sum;
      auto add = [&](int first) {  // one of the kScaleSums
        ChannelSum own;
        for (int t = first; t < kTileTokens; t += kScaleSums)
          own.add(fabsf(from_half_bits(tile[t * x.head_dim + c], x.dtype)));
        sum.add(own);
      };
#pragma unroll 1
      for (int i = 0; i < kScaleSums && c < x.head_dim; ++i) add(i);
      s.channel_scale[c] = sum.scale();
      atomicMax(&most, uint32_t{s.channel_scale[c]});
    }
    part.sync();
    for (int c = thread; c < HeadDim; c += Shape::kPartThreads) {
      s.channel_scale[c] = format::channel_scale(s.channel_scale[c], static_cast<uint16_t>(most));
      s.per_channel[c] = 1 / scale_value(s.channel_scale[c]);
    }
    part.sync();
  }

  // Writes the masks of the tile's channels and, with scales, those of its tokens.
  __device__ void select_tile(uint16_t const* tile) {
    constexpr int kWords = Shape::kWords;
    int half = thread / 32, lane = thread % 32;
    if constexpr (kNarrow) {
      if (thread == 0) preparation.refused[cache] = 0;
      part.sync();
    }
    if (half >= kHalves) return;
    auto& storage = reinterpret_cast<SelectStorage<kWords>*>(&s.dense)[half];
    DenseView const& x = a.x[cache];
    start_rows(storage, tile + half * kHalfTokens * x.head_dim, x.head_dim, x.head_dim, kHalfTokens, true, lane);
    cute::cp_async_wait<0>();
    __syncwarp();
    uint32_t planes[kWords][kMagnitudeBits], kept[kWords];
    read_planes(storage, planes, lane);
    if (x.dtype == DType::kBFloat16)
      unify_nans<true>(planes);
    else
      unify_nans<false>(planes);
    keep_largest(planes, a.keep[cache], kept);
    if constexpr (kNarrow) {
      auto const* row = reinterpret_cast<uint16_t const*>(storage.dense[lane]);
      LaneScaling scaling = a.scaling[cache];
      scaling.refused = &preparation.refused[cache];
      preparation.token_scale[cache][half * kHalfTokens + lane] =
          scaling.token_scale_of_row(row, x.dtype, s.per_channel, kept);
    }
    uint32_t* masks = preparation.masks(cache);
#pragma unroll
    for (int w = 0; w < kWords; ++w) masks[(half * kWords + w) * 32 + lane] = transpose_lanes(kept[w], lane);
  }

  // Deals the sequence's channels.
  __device__ void deal(uint8_t* of_head, uint16_t* scale_of_head) {
    auto* count = reinterpret_cast<int32_t*>(&s.dense);
    uint32_t const* masks = preparation.masks(cache);
    part.sync();  // wait until all warps have selected
    for (int c = thread; c < HeadDim; c += Shape::kPartThreads)
      count[c] = __popc(masks[c]) + __popc(masks[HeadDim + c]);
    part.sync();
    for (int c = thread; c < HeadDim; c += Shape::kPartThreads) {
      int position = dealt_position(count, HeadDim, c);
      of_head[position] = static_cast<uint8_t>(c);
      if constexpr (kNarrow) scale_of_head[position] = s.channel_scale[c];
    }
  }

  // What packing has in its own storage.
  __device__ void begin_packing(uint8_t const* channels) {
    constexpr int kVectors = sizeof(s.bits) / sizeof(uint4);
    for (int i = thread; i < kVectors; i += Shape::kPartThreads)
      reinterpret_cast<uint4*>(s.bits)[i] = reinterpret_cast<uint4 const*>(preparation.masks(cache))[i];
    for (int c = thread; c < HeadDim; c += Shape::kPartThreads) s.channel[c] = channels[c];
    if constexpr (kNarrow) {
      for (int t = thread; t < kTileTokens; t += Shape::kPartThreads)
        s.token_scale[t] = preparation.token_scale[cache][t];
      if (thread == 0 && preparation.refused[cache])
        atomicAdd(reinterpret_cast<unsigned long long*>(a.scaling[cache].refused),
                  static_cast<unsigned long long>(preparation.refused[cache]));
    }
  }

  template <Role kRole>
  __device__ void pack(uint16_t const* tile, AppendShared const& shared, int64_t slot, uint16_t const* scale_of_head) {
    constexpr bool kIsKey = kRole == Role::kKey;
    constexpr int kCache = kIsKey ? 0 : 1;
    SparseView const& view = a.views[kCache];
    int longest_key = shared.longest[0], most = kIsKey ? a.limits.most_keys : a.limits.values(longest_key);
    Trim<true> trim{shared.longest[kCache], most, nan_key(view.dtype), a.dropped + 2 * kCache};
    TileRows const& rows_of = kIsKey ? a.limits.key_rows : a.limits.value_rows;
    int rows = rows_of.of(min(trim.longest, trim.most)), value_rows = rows - rows_of.before_values;
    if (thread == 0) const_cast<int32_t*>(view.row_offsets)[slot] = rows;
    // Not view.first_row: the other part is writing the rows of the keys.
    int64_t first_row = slot * view.pages.slot_rows + (kIsKey ? 0 : a.limits.key_rows.of(a.limits.keys(longest_key)));
    TileSource source;
    source.rows = tile;
    source.stride_token = view.head_dim;
    source.tokens = kTileTokens;
    source.head_dim = view.head_dim;
    source.vectors = true;
    source.masks = nullptr;
    source.channel_order = nullptr;
    source.token_order = shared.token_order;
    auto* block = const_cast<uint32_t*>(view.blocks) + first_row * kLanes;
    if constexpr (kNarrow) {
      source.dtype = view.dtype;
      source.channel_scale = scale_of_head;
      source.token_scale = s.token_scale;
      pack_narrow_tile<kRole, HeadDim>(s, source, view.codec, block, value_rows, a.staged_rows, trim, part);
    } else {
      pack_tile<kRole, HeadDim, Fp16Codec, false, RolledLanePart<kRole, HeadDim>>(s, source, block, value_rows,
                                                                                  a.staged_rows, trim, part);
    }
  }
};

// A portion of the token order, by the first warp of each part; all but the counts by that of the keys for both.
template <int HeadDim, bool kNarrow>
__device__ void order_tokens(AppendPart<HeadDim, kNarrow> const& part, FitStorage& fits, uint8_t const* channels,
                             int portion) {
  constexpr int kWords = HeadDim / 32;
  auto& preparation = part.preparation;
  int lane = threadIdx.x % 32;
  if (portion == kCount) {
    uint32_t scaled[kLaneTokens][kCountWords];
    uint32_t ratios = count_tokens<kWords, kCaches>(preparation.rows.rows[part.cache],
                                                    {preparation.masks(part.cache), channels}, lane, scaled);
    if (lane == 0) preparation.ratios[part.cache] = ratios;
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j)
#pragma unroll
      for (int i = 0; i < kCountWords; ++i)
        preparation.tokens[lane][j].count[part.cache * kCountWords + i] = scaled[j][i];
    return;
  }
  if (part.cache) return;
  Token<kCaches> mine[kLaneTokens];
  uint32_t load[kCaches * kLoadWords];
#pragma unroll
  for (int j = 0; j < kLaneTokens; ++j) mine[j] = preparation.tokens[lane][j];
  if (portion == kFirstRounds) begin_order<kCaches>(mine, lane);
  add_loads<kCaches>(mine, load);
  if (portion < kOrder) {
    int first = (portion - kFirstRounds) * kPortionRounds;
    exchange_in_rounds<kCaches>(mine, load, first, first + kPortionRounds, lane);
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) preparation.tokens[lane][j] = mine[j];
    return;
  }
  uint32_t ratios[kCaches], *rows[] = {preparation.masks(0), preparation.masks(1)};
#pragma unroll
  for (int o = 0; o < kCaches; ++o) ratios[o] = preparation.ratios[o];
  int longest[kCaches];
  write_order<true>(preparation.rows, rows, mine, load, ratios, Fit{fits, part.a.limits}, preparation.token_order,
                    longest, lane);
#pragma unroll
  for (int o = 0; o < kCaches; ++o)
    if (lane == 0) preparation.longest[o] = longest[o];
}

}  // namespace cute_kernels::compress
