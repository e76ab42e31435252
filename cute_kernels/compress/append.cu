// Copies new tokens to the windows of their sequences; compresses a tile into its slot where it is due, and has the
// oldest tokens leave a window that holds a tile too much. One CTA a sequence and KV head. Most calls only copy a few
// tokens, so nothing is done before it is needed.
//
// Attention waits for the slowest CTA. So a tile that is complete, and stays in the window for some calls, is prepared
// there, a portion a call; the call that stores it does what is left.
//
// One part of the CTA's threads works on the keys, the other on the values. What a portion finds is in the tile's
// Preparation; the steps of a portion pass their data to each other in shared memory.
#include <algorithm>

#include "cute_kernels/common/device.hpp"
#include "cute_kernels/compress/deal_head.hpp"
#include "cute_kernels/compress/fit.hpp"
#include "cute_kernels/compress/pages.hpp"
#include "cute_kernels/compress/tile_kernel.hpp"
#include "cute_kernels/compress/trim.hpp"
#include "cute_kernels/pipeline/launch.hpp"

namespace cute_kernels::compress {
namespace {

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

// The state of a sequence before the call, and how the call changes it. A window begins with a tile's first token.
struct AppendState {
  int held, total;  // tokens of the window
  int compressed;   // tokens
  bool moves;       // a tile's tokens leave the window
  bool stores;      // a tile, which begins with this token of the window
  int begin;
  int prepared, until;  // portions that are done before the call, and after it
  int64_t slot;

  __device__ AppendState(AppendArguments const& a, int sequence, int kv_head) {
    held = a.windows.lengths[sequence];
    compressed = a.lengths[sequence];
    int done = a.windows.prepared ? a.windows.prepared[sequence] : 0;
    total = held + static_cast<int>(a.x[0].tokens);
    moves = total >= a.windows.recent + kTileTokens;
    stores = a.windows.stores_full ? total / kTileTokens > held / kTileTokens : moves;
    begin = a.windows.stores_full ? (total / kTileTokens - 1) * kTileTokens : 0;
    // What a window that holds less than a tile had prepared was of tokens that were cut off.
    prepared = held < kTileTokens ? 0 : done;
    until = min(prepared + (a.windows.prepared && total >= kTileTokens), int{kLeave});
    if (stores || moves) until = kPortions;
    if (!stores && moves) prepared = kLeave;
    slot = stores ? find_slot(a.views[0], sequence, kv_head, tile()) : 0;
  }
  __device__ int tile() const { return (compressed + begin) / kTileTokens; }
  __device__ bool fits(Windows const& windows) const { return total <= windows.capacity && slot != kNoSlot; }
};

// Eight values from where they may not be aligned.
__device__ uint4 load_vector(uint16_t const* from, bool aligned) {
  if (aligned) return *reinterpret_cast<uint4 const*>(from);
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = from[2 * i] | uint32_t{from[2 * i + 1]} << 16;
  return make_uint4(word[0], word[1], word[2], word[3]);
}

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
      if (s.channel_scale[c] == 0) s.channel_scale[c] = static_cast<uint16_t>(most ? most : kScaleOfOne);
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

// So many tokens behind a tile, 64 at a time: what is overwritten has been read before. vectors: of a token.
__device__ __forceinline__ void move_to_begin(uint16_t* keys, uint16_t* values, int vectors, int tokens, int threads) {
  int all = tokens * vectors, at_a_time = kTileTokens * vectors;
  for (int first = 0; first < all; first += at_a_time) {
    __syncthreads();
    for (int v = first + threadIdx.x; v < min(all, first + at_a_time); v += threads) {
      auto *key = reinterpret_cast<uint4*>(keys) + v, *value = reinterpret_cast<uint4*>(values) + v;
      uint4 moved_key = key[at_a_time], moved_value = value[at_a_time];
      *key = moved_key;
      *value = moved_value;
    }
  }
}

// The portions that are due. Code far behind the kernel's begin takes long to arrive, and the compiler puts the last
// case first: that of the longest portion. Inlined, or parameters would be copied to local memory.
template <int HeadDim, bool kNarrow>
__device__ __forceinline__ void do_portions(AppendArguments const& a, uint8_t* memory, AppendShared& shared,
                                            int sequence, int kv_head, int64_t window, AppendState const& state) {
  using Shape = AppendShape<HeadDim, kNarrow>;
  using Packing = typename Shape::Packing;
  using Prepared = Preparation<Shape::kWords>;
  int64_t head = int64_t{sequence} * a.x[0].kv_heads + kv_head;
  auto& preparation = a.windows.preparation ? reinterpret_cast<Prepared*>(a.windows.preparation)[head]
                                            : *reinterpret_cast<Prepared*>(memory + Shape::kPreparation);
  int cache = threadIdx.x >= Shape::kPartThreads;
  auto& storage = *reinterpret_cast<Packing*>(memory + (cache ? a.part_bytes : 0));
  AppendPart<HeadDim, kNarrow> part{a, storage, preparation, cache};
  DenseView const& x = a.x[0];
  uint16_t const* tile = (cache ? a.windows.values : a.windows.keys) + window + int64_t{state.begin} * x.head_dim;
  SparseView const& view = a.views[cache];
  auto* channels = const_cast<uint8_t*>(view.channel_order_of(sequence, kv_head));
  auto* scales = const_cast<uint16_t*>(view.channel_scale_of(sequence, kv_head));
#pragma unroll 1
  for (int portion = state.prepared; portion < state.until; ++portion) {
    if (portion > kSelect && portion < kLeave) {
      if (part.thread < 32)
        order_tokens<HeadDim, kNarrow>(part, *reinterpret_cast<FitStorage*>(&storage.dense), channels, portion);
    } else if (portion == kSelect) {
      bool deals = state.tile() == 0 && view.order_heads > 0;
      if constexpr (kNarrow) part.scale_channels(tile, channels, scales, deals);
      part.select_tile(tile);
      if (deals) part.deal(channels, scales);
    } else {
      if (state.stores) {
        part.begin_packing(channels);
        if (threadIdx.x < kTileTokens) {
          uint8_t token = preparation.token_order[threadIdx.x];
          shared.token_order[threadIdx.x] = token;
          const_cast<uint8_t*>(a.views[0].token_order)[state.slot * kTileTokens + threadIdx.x] = token;
        }
        if (threadIdx.x < kCaches) shared.longest[threadIdx.x] = preparation.longest[threadIdx.x];
        __syncthreads();
        if (cache)
          part.template pack<Role::kValue>(tile, shared, state.slot, scales);
        else
          part.template pack<Role::kKey>(tile, shared, state.slot, scales);
      }
      if (state.moves)
        move_to_begin(a.windows.keys + window, a.windows.values + window, x.head_dim / kVectorValues,
                      state.total - kTileTokens, Shape::kThreads);
    }
    __syncthreads();
  }
}

template <int HeadDim, bool kNarrow>
__global__ void __launch_bounds__(AppendShape<HeadDim, kNarrow>::kThreads, AppendShape<HeadDim, kNarrow>::kMinCtas)
    append_kernel(AppendArguments const a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ AppendShared shared;
  ptx::wait_for_primary();  // and lets no dependent begin before it ends: attention was slower on CTAs set up early
  using Shape = AppendShape<HeadDim, kNarrow>;
  DenseView const& x = a.x[0];
  int kv_heads = x.kv_heads, kv_head = blockIdx.x % kv_heads, vectors = x.head_dim / kVectorValues;  // of a token
  int count = kCaches * static_cast<int>(x.tokens) * vectors;                                        // new vectors
  auto load = [&](int i) {
    int cache = i >= count / kCaches, j = cache ? i - count / kCaches : i;
    DenseView const& from = a.x[cache];
    return load_vector(from.row(blockIdx.x, j / vectors) + j % vectors * kVectorValues, a.vectors[cache]);
  };
  // The first load is issued before its destination is known.
  int i = threadIdx.x;
  uint4 vector = i < count ? load(i) : uint4{};
  int sequence = a.sequences ? a.sequences[blockIdx.x / kv_heads] : blockIdx.x / kv_heads;
  if (sequence < 0) return;
  if (sequence >= a.views[0].batch) {
    if (threadIdx.x == 0) *a.error = 1;
    return;
  }
  AppendState state(a, sequence, kv_head);
  bool fits = state.fits(a.windows);
  int64_t head = int64_t{sequence} * kv_heads + kv_head, window = head * a.windows.capacity * x.head_dim;
  uint16_t *keys = a.windows.keys + window, *values = a.windows.values + window;
  if (state.stores) {  // while the slot is looked up
    auto prefetch = [&](void const* from, int bytes) {
      constexpr int kLine = 128;
#pragma unroll 1
      for (int i = threadIdx.x * kLine; i < bytes; i += Shape::kThreads * kLine)
        ptx::prefetch(static_cast<uint8_t const*>(from) + i);
    };
    int begin = state.begin * x.head_dim, bytes = (state.held - state.begin) * x.head_dim * int{sizeof(uint16_t)};
    prefetch(keys + begin, bytes);
    prefetch(values + begin, bytes);
    if (a.windows.preparation) {
      constexpr int kBytes = sizeof(Preparation<Shape::kWords>);
      prefetch(a.windows.preparation + head * kBytes, kBytes);
    }
  }
  // The last head to arrive updates the sequence's state and resets the counter: all have read it then. In a warp that
  // has nothing to copy for a token or two.
  __syncthreads();
  if (threadIdx.x == Shape::kThreads - 1) {
    __threadfence();
    if (atomicAdd(a.windows.arrivals + sequence, 1) == kv_heads - 1) {
      a.windows.arrivals[sequence] = 0;
      if (fits) {
        a.windows.lengths[sequence] = state.total - (state.moves ? kTileTokens : 0);
        if (a.windows.prepared) a.windows.prepared[sequence] = state.moves ? 0 : state.until;
        if (state.moves) {
          a.lengths[sequence] = state.compressed + kTileTokens;
          if (a.share.lengths && state.compressed / kTileTokens % a.share.ranks == a.share.rank)
            a.share.lengths[sequence] += kTileTokens;
        }
      } else {
        *a.error = 1;
      }
    }
  }
  while (fits && i < count) {
    int cache = i >= count / kCaches, j = cache ? i - count / kCaches : i;
    *reinterpret_cast<uint4*>((cache ? values : keys) + state.held * x.head_dim + j * kVectorValues) = vector;
    i += Shape::kThreads;
    if (i < count) vector = load(i);
  }
  if (!fits || state.prepared >= state.until) return;
  __syncthreads();  // the window is complete
  do_portions<HeadDim, kNarrow>(a, memory, shared, sequence, kv_head, window, state);
}

template <int HeadDim, bool kNarrow>
void launch_append(AppendArguments& a, int keep, unsigned ctas, cudaStream_t stream) {
  using Shape = AppendShape<HeadDim, kNarrow>;
  // As for bulk compression, or as many rows as fit.
  int most_bytes = (current_device().shared_bytes - static_cast<int>(sizeof(AppendShared)) - 1024) / kCaches;
  a.staged_rows = staged_rows(HeadDim, keep);
  while (a.staged_rows > TileFormat::bitmap_rows(HeadDim) && Shape::part_bytes(a.staged_rows) > most_bytes)
    a.staged_rows -= 8;
  a.part_bytes = Shape::part_bytes(a.staged_rows);
  int bytes = kCaches * a.part_bytes;
  auto* kernel = append_kernel<HeadDim, kNarrow>;
  allow_shared_bytes(kernel, bytes);
  pipeline::launch_dependent(kernel, ctas, Shape::kThreads, bytes, current_device().programmatic_launch, stream, a);
}

}  // namespace

int preparation_bytes(int padded_head_dim) {
  int bytes = 0;
  format::visit_head_dim(padded_head_dim, [&](auto head_dim) { bytes = sizeof(Preparation<head_dim() / 32>); });
  return bytes;
}

void append(Pool const& pool, Windows const& windows, int32_t* lengths, DenseView const& k, DenseView const& v,
            int32_t const* sequences, Share const& share, cudaStream_t stream) {
  bool is_narrow = format::is_narrow(pool.keys.codec);
  if (is_narrow != format::is_narrow(pool.values.codec))
    throw std::runtime_error(std::string("appending to a pool with keys in codec ") +
                             format::codec_name(pool.keys.codec) + " and values in codec " +
                             format::codec_name(pool.values.codec) + " is not served on a GPU");
  AppendArguments a{};
  for (int i = 0; i < kCaches; ++i) {
    a.x[i] = i ? v : k;
    a.vectors[i] = a.x[i].has_vectors();
    a.views[i] = i ? pool.values : pool.keys;
    a.keep[i] = most_kept(i ? pool.value_keep : pool.key_keep);
    a.scaling[i] = LaneScaling(a.views[i].codec, pool.refused + i);
  }
  a.limits = SlotLimits(pool);
  a.dropped = pool.dropped;
  a.error = pool.error;
  a.windows = windows;
  a.lengths = lengths;
  a.sequences = sequences;
  a.share = share;
  unsigned ctas = static_cast<unsigned>(k.batch * k.kv_heads);
  int keep = pool.key_keep && pool.value_keep ? std::max(pool.key_keep, pool.value_keep) : 0;
  format::visit_head_dim(pool.keys.padded_head_dim, [&](auto head_dim) {
    if (is_narrow)
      launch_append<head_dim(), true>(a, keep, ctas, stream);
    else
      launch_append<head_dim(), false>(a, keep, ctas, stream);
  });
}

}  // namespace cute_kernels::compress
