// Token orders of tiles that are too long for their slots: `fit_token_order` of format/token_order.hpp by a warp.
#pragma once

#include "cute_kernels/compress/balance_tile.hpp"
#include "cute_kernels/compress/pool.hpp"

namespace cute_kernels::compress {

inline constexpr int kPairClasses = 2 * kClasses;

struct FitStorage {
  uint8_t count[kTileTokens][kPairClasses];  // by token
  int16_t load[kTokenGroups][kPairClasses];
  uint8_t order[kTileTokens];
};

// Of a K/V pair. Few tiles need it: it trades time for registers.
struct Fit {
  FitStorage& s;
  SlotLimits const& limits;

  __device__ void operator()(Token<2> (&mine)[kLaneTokens], uint32_t const* load, uint32_t const* ratios,
                             int (&longest)[2], int lane) const {
    int const bound[2] = {limits.keys(longest[0]), limits.values(longest[0])};
    if (longest[0] <= bound[0] && longest[1] <= bound[1]) return;
    remove_scales(mine, load, ratios, lane);
    __syncwarp();
    int swaps = 0;
    while (swaps < kFitSwaps && swap_tokens(bound, lane)) ++swaps;
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) mine[j].norm = s.order[position_of(lane, j)];
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      int most = 0;
      for (int i = lane; i < kTokenGroups * kClasses; i += 32)
        most = max(most, s.load[i / kClasses][o * kClasses + i % kClasses]);
      longest[o] = __reduce_max_sync(kAllLanes, most);
    }
  }

 private:
  __device__ void remove_scales(Token<2> const (&mine)[kLaneTokens], uint32_t const* load, uint32_t const* ratios,
                                int lane) const {
#pragma unroll
    for (int c = 0; c < kPairClasses; ++c) {
      uint32_t ratio = ratios[c / kClasses] >> 4 * (c % kClasses) & 15;
#pragma unroll
      for (int j = 0; j < kLaneTokens; ++j)
        s.count[mine[j].norm & (kTileTokens - 1)][c] =
            static_cast<uint8_t>((mine[j].count[c / 4] >> 8 * (c % 4) & 0xff) * ratio / kRatioBase);
      if (lane % kLaneGroup == 0)
        s.load[lane / kLaneGroup][c] =
            static_cast<int16_t>((load[c / 2] >> 16 * (c % 2) & 0xffff) * ratio / kRatioBase);
    }
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j)
      s.order[position_of(lane, j)] = static_cast<uint8_t>(mine[j].norm & (kTileTokens - 1));
  }

  // Whether a swap helped.
  __device__ bool swap_tokens(int const (&bound)[2], int lane) const {
    constexpr int kSwapBits = 9;  // a member of group a, a position
    int excess = 0;
#pragma unroll 1
    for (int i = lane; i < kTokenGroups * kPairClasses; i += 32) {
      int group = i / kPairClasses, c = i % kPairClasses;
      int above = max(s.load[group][c] - (c < kClasses ? bound[0] : bound[1]), 0);
      excess = max(excess, above * kTokenGroups + kTokenGroups - 1 - group);
    }
    excess = __reduce_max_sync(kAllLanes, excess);
    if (excess < kTokenGroups) return false;
    int a = kTokenGroups - 1 - excess % kTokenGroups, best = 0;
#pragma unroll 1
    for (int i = lane; i < kGroupTokens * kTileTokens; i += 32) {
      int x = i / kTileTokens, y = i % kTileTokens;
      if (y % kTokenGroups == a) continue;
      int change = change_of(bound, a, s.order[a + kTokenGroups * x], y % kTokenGroups, s.order[y]);
      best = min(best, change * (1 << kSwapBits) + i);
    }
    best = __reduce_min_sync(kAllLanes, best);
    if (best >= 0) return false;
    int x = a + kTokenGroups * (best >> kIndexBits & (kGroupTokens - 1)), y = best & (kTileTokens - 1);
    int token_x = s.order[x], token_y = s.order[y];
    __syncwarp();
    if (lane < kPairClasses) {
      int d = s.count[token_y][lane] - s.count[token_x][lane];
      s.load[a][lane] += d;
      s.load[y % kTokenGroups][lane] -= d;
    }
    if (lane == 0) s.order[x] = static_cast<uint8_t>(token_y), s.order[y] = static_cast<uint8_t>(token_x);
    __syncwarp();
    return true;
  }

  // Of the squared excesses when groups a and b swap their tokens x and y.
  __device__ int change_of(int const (&bound)[2], int a, int x, int b, int y) const {
    int change = 0;
#pragma unroll 2
    for (int c = 0; c < kPairClasses; ++c) {
      int d = s.count[y][c] - s.count[x][c], of_a = s.load[a][c], of_b = s.load[b][c];
      int most = c < kClasses ? bound[0] : bound[1];
      change += squared_excess(of_a + d, most) - squared_excess(of_a, most) + squared_excess(of_b - d, most) -
                squared_excess(of_b, most);
    }
    return change;
  }
};

}  // namespace cute_kernels::compress
