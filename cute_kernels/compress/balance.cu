// The token order of every tile, one warp a tile: the algorithm of format/token_order.hpp, candidates spread over
// lanes.
#include "cute_kernels/common/error.hpp"
#include "cute_kernels/compress/compress.hpp"
#include "cute_kernels/format/token_order.hpp"

namespace cute_kernels::compress {
namespace {

using namespace format;

constexpr int kWarps = 4;  // a CTA
constexpr uint32_t kAllLanes = ~0u;
static_assert(kTileTokens == 64 && kTokenGroups == 8, "a lane ranks two tokens; a quad of lanes holds a group");

template <int Classes>
struct BalanceStorage {
  uint8_t count[kTileTokens][Classes];
  int load[kTokenGroups][Classes];
  uint8_t by_unusual[kTileTokens];
  uint8_t group[kTileTokens];
  uint32_t class_mask[Classes][kMaxHeadDim / 32];
};

__device__ int ranked_before(int unusual, int token, int other, int other_token) {
  return other > unusual || (other == unusual && other_token < token);
}

// counts of nonzeros by class, from the masks of this tile's tokens
template <int Classes, int First>
__device__ void count_classes(BalanceStorage<Classes>& s, BalanceOperand const& operand, int64_t head, int64_t tokens,
                              int64_t first_token, int padded, int lane) {
  int words = padded / 32;
  uint8_t const* order = operand.channel_order + head * padded;
  for (int i = lane; i < kClasses * words; i += 32) s.class_mask[First + i / words][i % words] = 0;
  __syncwarp();
  for (int position = lane; position < padded; position += 32)
    atomicOr(&s.class_mask[First + position % kClasses][order[position] / 32], 1u << order[position] % 32);
  __syncwarp();
  for (int t = lane; t < kTileTokens; t += 32) {
    int64_t token = first_token + t;
    int count[kClasses] = {};
    for (int w = 0; token < tokens && w < words; ++w) {
      uint32_t mask = operand.masks[(head * tokens + token) * words + w];
#pragma unroll
      for (int c = 0; c < kClasses; ++c) count[c] += __popc(mask & s.class_mask[First + c][w]);
    }
#pragma unroll
    for (int c = 0; c < kClasses; ++c) s.count[t][First + c] = static_cast<uint8_t>(count[c]);
  }
  __syncwarp();
}

template <int Classes>
__device__ void assign_greedily(BalanceStorage<Classes>& s, int lane) {
  constexpr int kPart = Classes / 4;  // classes of a lane; lane = 4 * group + part
  int mean[Classes], unusual0 = 0, unusual1 = 0;
#pragma unroll
  for (int c = 0; c < Classes; ++c) {
    int sum = __reduce_add_sync(kAllLanes, static_cast<int>(s.count[lane][c]) + s.count[lane + 32][c]);
    mean[c] = (sum * kBalanceScale + kTileTokens / 2) / kTileTokens;
    int d0 = kBalanceScale * s.count[lane][c] - mean[c], d1 = kBalanceScale * s.count[lane + 32][c] - mean[c];
    unusual0 += d0 * d0, unusual1 += d1 * d1;
  }
  int rank0 = 0, rank1 = 0;
  for (int u = 0; u < 32; ++u) {
    int other0 = __shfl_sync(kAllLanes, unusual0, u), other1 = __shfl_sync(kAllLanes, unusual1, u);
    rank0 += ranked_before(unusual0, lane, other0, u) + ranked_before(unusual0, lane, other1, u + 32);
    rank1 += ranked_before(unusual1, lane + 32, other0, u) + ranked_before(unusual1, lane + 32, other1, u + 32);
  }
  s.by_unusual[rank0] = static_cast<uint8_t>(lane);
  s.by_unusual[rank1] = static_cast<uint8_t>(lane + 32);
  __syncwarp();

  int part = lane % 4, group = lane / 4, members = 0, drift[kPart] = {}, load[kPart] = {}, my_mean[kPart];
#pragma unroll
  for (int c = 0; c < Classes; ++c)
    if (c / kPart == part) my_mean[c % kPart] = mean[c];
  for (int i = 0; i < kTileTokens; ++i) {
    int t = s.by_unusual[i], cost = 0, deviation[kPart];
#pragma unroll
    for (int c = 0; c < kPart; ++c) {
      deviation[c] = kBalanceScale * s.count[t][part * kPart + c] - my_mean[c];
      cost += (drift[c] + deviation[c]) * (drift[c] + deviation[c]);
    }
    cost += __shfl_xor_sync(kAllLanes, cost, 1);
    cost += __shfl_xor_sync(kAllLanes, cost, 2);
    uint32_t mine = members == kGroupTokens ? ~0u : static_cast<uint32_t>(cost);
    uint32_t least = __reduce_min_sync(kAllLanes, mine);
    int best = (__ffs(__ballot_sync(kAllLanes, mine == least)) - 1) / 4;  // ties: lower group
    if (group == best) {
      ++members;
#pragma unroll
      for (int c = 0; c < kPart; ++c) drift[c] += deviation[c], load[c] += s.count[t][part * kPart + c];
    }
    if (lane == 0) s.group[t] = static_cast<uint8_t>(best);
  }
#pragma unroll
  for (int c = 0; c < kPart; ++c) s.load[group][part * kPart + c] = load[c];
  __syncwarp();
}

// The swap of a token x of group `from` and a token y of another that leaves their longest stream shortest.
template <int Classes>
__device__ bool swap_best_pair(BalanceStorage<Classes>& s, int lane) {
  constexpr int kStreams = kTokenGroups * Classes;
  uint32_t longest = 0;  // length << 8 | inverted index: ties to the lower group
#pragma unroll
  for (int i = 0; i < kStreams; i += 32) {
    uint32_t key =
        static_cast<uint32_t>(s.load[(i + lane) / Classes][(i + lane) % Classes]) << 8 | (kStreams - 1 - (i + lane));
    longest = key > longest ? key : longest;
  }
  longest = __reduce_max_sync(kAllLanes, longest);
  int from = (kStreams - 1 - static_cast<int>(longest & 0xff)) / Classes;
  int length = static_cast<int>(longest >> 8);

  uint32_t best = ~0u;  // worst << 12 | x << 6 | y: ties to the lower x, then to the lower y
  for (int half = 0; half < 2; ++half) {
    int y = lane + 32 * half, to = s.group[y];
    if (to == from) continue;
    int room_from[Classes], room_to[Classes];  // what x's count is added to or taken from
#pragma unroll
    for (int c = 0; c < Classes; ++c) {
      room_from[c] = s.load[from][c] + s.count[y][c];
      room_to[c] = s.load[to][c] - s.count[y][c];
    }
    for (int x = 0; x < kTileTokens; ++x) {
      if (s.group[x] != from) continue;
      int worst = 0;
#pragma unroll
      for (int c = 0; c < Classes; ++c)
        worst = max(worst, max(room_from[c] - s.count[x][c], room_to[c] + s.count[x][c]));
      uint32_t key = static_cast<uint32_t>(worst) << 12 | x << 6 | y;
      if (worst < length && key < best) best = key;
    }
  }
  best = __reduce_min_sync(kAllLanes, best);
  if (best == ~0u) return false;
  int x = best >> 6 & 63, y = best & 63, to = s.group[y];
  __syncwarp();
  if (lane < Classes) {
    int d = s.count[x][lane] - s.count[y][lane];
    s.load[from][lane] -= d;
    s.load[to][lane] += d;
  }
  if (lane == 0) s.group[x] = static_cast<uint8_t>(to), s.group[y] = static_cast<uint8_t>(from);
  __syncwarp();
  return true;
}

template <int Classes>
__global__ void __launch_bounds__(32 * kWarps)
    balance_kernel(BalanceOperand first, BalanceOperand second, int64_t tiles, int64_t tiles_per_head, int64_t tokens,
                   int padded, uint8_t* token_order) {
  __shared__ BalanceStorage<Classes> storage[kWarps];
  BalanceStorage<Classes>& s = storage[threadIdx.x / 32];
  int lane = threadIdx.x % 32;
  int64_t tile = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (tile >= tiles) return;
  int64_t head = tile / tiles_per_head, first_token = tile % tiles_per_head * kTileTokens;
  count_classes<Classes, 0>(s, first, head, tokens, first_token, padded, lane);
  if constexpr (Classes > kClasses)
    count_classes<Classes, kClasses>(s, second, head, tokens, first_token, padded, lane);
  assign_greedily(s, lane);
  for (int i = 0; i < kTokenSwaps && swap_best_pair(s, lane); ++i) {}

  // Positions of a group are group, group + 8, ..., in increasing order of token.
  for (int t = lane; t < kTileTokens; t += 32) {
    int before = 0;
    for (int u = 0; u < t; ++u) before += s.group[u] == s.group[t];
    token_order[tile * kTileTokens + s.group[t] + kTokenGroups * before] = static_cast<uint8_t>(t);
  }
  auto longest_of = [&](int first_class) {
    int longest = 0;
    for (int i = lane; i < kTokenGroups * kClasses; i += 32)
      longest = max(longest, s.load[i / kClasses][first_class + i % kClasses]);
    return __reduce_max_sync(kAllLanes, longest);
  };
  int longest = longest_of(0);
  if (lane == 0) first.longest[tile] = longest;
  if constexpr (Classes > kClasses) {
    longest = longest_of(kClasses);
    if (lane == 0) second.longest[tile] = longest;
  }
}

}  // namespace

void balance(BalanceOperand const& first, BalanceOperand const& second, int heads, int64_t tokens, int padded_head_dim,
             uint8_t* token_order, cudaStream_t stream) {
  int64_t tiles_per_head = (tokens + kTileTokens - 1) / kTileTokens, tiles = heads * tiles_per_head;
  auto launch = [&](auto kernel) {
    kernel<<<static_cast<unsigned>((tiles + kWarps - 1) / kWarps), 32 * kWarps, 0, stream>>>(
        first, second, tiles, tiles_per_head, tokens, padded_head_dim, token_order);
  };
  if (second.masks) launch(balance_kernel<2 * kClasses>);
  else launch(balance_kernel<kClasses>);
  check_cuda(cudaGetLastError(), "launch of balance");
}

}  // namespace cute_kernels::compress
