// The order of tokens in tiles of at most two of four (format/group_order.hpp); a warp a tile.
#include "cute_kernels/compress/slots.hpp"
#include "cute_kernels/format/group_order.hpp"

namespace cute_kernels::compress {
namespace {

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

}  // namespace

void order_slots(SlotOrder keys, CodecId key_codec, SlotOrder values, CodecId value_codec, int64_t tiles,
                 uint8_t* token_order, cudaStream_t stream) {
  auto streams = [](CodecId id) {
    return visit_codec(id, [](auto codec) { return SlotTile::Packed<decltype(codec)>::kStreams; });
  };
  keys.streams = streams(key_codec), values.streams = streams(value_codec);
  launch_tiles(order_slots_kernel, (tiles + kOrderWarps - 1) / kOrderWarps, 32 * kOrderWarps, 0, stream,
               "launch of order_slots", keys, values, tiles, token_order);
}

}  // namespace cute_kernels::compress
