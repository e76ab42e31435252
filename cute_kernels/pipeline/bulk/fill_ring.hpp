// The load side of a ring: up to four warps fill its stages by bulk copies. One warp alone issues them too slowly for
// an SM's share of the memory bandwidth.
#pragma once

#include <cstring>  // memcpy
#include <cute/arch/cluster_sm90.hpp>
#include <type_traits>

#include "cute_kernels/pipeline/bulk/ring.hpp"

namespace cute_kernels::pipeline {

// What another lane has, of a type of plain words.
template <class T>
CUTE_DEVICE T of_lane(T const& x, int lane) {
  static_assert(sizeof(T) % sizeof(uint32_t) == 0 && std::is_trivially_copyable_v<T>);
  uint32_t words[sizeof(T) / sizeof(uint32_t)];
  memcpy(words, &x, sizeof x);
  CUTE_UNROLL
  for (uint32_t& word : words) word = __shfl_sync(~0u, word, lane);
  T result;
  memcpy(&result, words, sizeof x);
  return result;
}

// Waits until the tile for `at` may be in flight beside those before it.
template <class TileLoad>
CUTE_DEVICE void wait_in_flight(StageRing const& ring, RingIndex at) {
  TilesInFlight const& most = ring.shape.in_flight;
  int first = at.stage - most.first;
  if (at.use == 0 && first >= 0) {
    ring.wait_full({first, 0});
  } else if (TileLoad::kLimitsLater && at.use > 0 && most.later > 0) {
    RingIndex landing{at.stage - most.later, at.use};
    if (landing.stage < 0) landing.stage += ring.shape.stages, --landing.use;
    ring.wait_full(landing);
  }
}

// As many iterations for every worker; where a worker has no tile for an iteration, the stage arrives empty.
// TileLoad(args..., number) looks up where a tile lies, every lane one ahead of time; plain words;
//   kLimitsLater  whether RingShape::in_flight.later may be a limit; else there is no code for it
//   void load(args..., uint8_t* stage, Barrier& full)  in one lane, starts the copies
template <class TileLoad, class... Args>
CUTE_DEVICE void fill_ring(StageRing const& ring, int producer, int iterations, Args const&... args) {
  int lane = threadIdx.x % 32, producers = ring.shape.producers;
  if (producer >= producers) return ring.arrive();
  int tiles = iterations * ring.shape.producer_workers;  // of this producer
  int fresh = min(ring.shape.producer_stages, 31);       // copies after which the first have to be waited for
  TileLoad mine, next;
  RingIndex at{producer, 0};
  // From `fresh` of the 32 before the first, so that lookups are in one place: code is small, or late to arrive.
  for (int i = fresh, first = -32; first < tiles; first += 32, i = 0) {
    mine = next;
    int end = min(32, tiles - first);
    CUTE_NO_UNROLL
    for (; i < end; ++i) {
      if (i == fresh) next = TileLoad(args..., producer + (first + 32 + lane) * producers);
      if (first < 0) {
        ring.join();
        break;
      }
      TileLoad tile = of_lane(mine, i);  // in all lanes: the operands of copies are uniform
      ring.wait_empty(at);
      wait_in_flight<TileLoad>(ring, at);
      if (cute::elect_one_sync()) tile.load(args..., ring[at], ring.full(at));
      __syncwarp();  // the lane that issues must not be left behind by lanes that wait
      int stage = at.stage + producers;
      bool wraps = stage >= ring.shape.stages;
      at.stage = wraps ? producer : stage;
      at.use += wraps;
    }
  }
}

}  // namespace cute_kernels::pipeline
