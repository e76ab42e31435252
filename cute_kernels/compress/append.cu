// Copies new tokens to the windows of their sequences; compresses a tile into its slot where it is due, and has the
// oldest tokens leave a window that holds a tile too much. One CTA a sequence and KV head. Most calls only copy a few
// tokens, so nothing is done before it is needed.
//
// Attention waits for the slowest CTA. So a tile that is complete, and stays in the window for some calls, is prepared
// there, a portion a call; the call that stores it does what is left.
//
// One part of the CTA's threads works on the keys, the other on the values (append_portions.hpp).
#include <algorithm>

#include "cute_kernels/common/device.hpp"
#include "cute_kernels/compress/append_portions.hpp"
#include "cute_kernels/pipeline/launch.hpp"

namespace cute_kernels::compress {
namespace {

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
  __device__ bool lengths_are_possible(Windows const& windows) const {
    return held >= 0 && held <= windows.capacity && compressed >= 0;
  }
  __device__ bool fits(Windows const& windows) const {
    return lengths_are_possible(windows) && total <= windows.capacity && slot != kNoSlot;
  }
};

// Eight values from where they may not be aligned.
__device__ uint4 load_vector(uint16_t const* from, bool aligned) {
  if (aligned) return *reinterpret_cast<uint4 const*>(from);
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = from[2 * i] | uint32_t{from[2 * i + 1]} << 16;
  return make_uint4(word[0], word[1], word[2], word[3]);
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
  if (state.stores && state.lengths_are_possible(a.windows)) {  // while the slot is looked up
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
