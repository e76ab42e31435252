// The load side of a ring: up to four warps fill its stages by bulk copies. One warp alone issues them too slowly for
// an SM's share of the memory bandwidth.
#pragma once

#include "cute_kernels/pipeline/bulk/ring.hpp"

namespace cute_kernels::pipeline {

// Tiles of a CTA in flight at most. Memory serves all requests at once: the fewer there are, the sooner the first tiles
// are complete.
inline constexpr int kTilesInFlight = 12;
static_assert(kTilesInFlight % (kMaxProducers * (kMaxProducers - 1)) == 0);  // so that a producer waits for its own

// As many iterations for every worker; where a worker has no tile for an iteration, the stage arrives empty.
// TileLoad(args..., number) looks up where a tile lies, every lane one ahead of time;
//   void load(args..., uint8_t* stage, Barrier& full)  in one lane, starts the copies
template <class TileLoad, class... Args>
CUTE_DEVICE void fill_ring(StageRing const& ring, int producer, int iterations, Args const&... args) {
  int lane = threadIdx.x % 32, producers = ring.shape.producers, end = iterations * ring.shape.workers.divisor;
  if (producer >= producers) return ring.arrive();
  int fresh = min(ring.shape.producer_stages, 31);  // copies after which the first have to be waited for
  TileLoad mine, next;
  // From `fresh` of the 32 before the first, so that lookups are in one place: code is small, or late to arrive.
  for (int i = fresh, first = producer - 32 * producers; first < end; first += 32 * producers, i = 0) {
    mine = next;
    CUTE_NO_UNROLL
    for (; i < 32 && first + i * producers < end; ++i) {
      __syncwarp();  // a lane that still issues must not be left behind by lanes that wait
      if (i == fresh) next = TileLoad(args..., first + (32 + lane) * producers);
      if (first < 0) {
        ring.join();
        break;
      }
      RingIndex at = ring.index_of(first + i * producers), landing{at.stage - kTilesInFlight, at.use};
      ring.wait_empty(at);
      if (landing.stage < 0) landing.stage += ring.shape.stages.divisor, --landing.use;
      // With fewer stages it has landed, for its stage has been filled again.
      if (landing.use >= 0 && ring.shape.stages.divisor >= kTilesInFlight) ring.wait_full(landing);
      if (lane == i) mine.load(args..., ring[at], ring.full(at));
    }
  }
}

}  // namespace cute_kernels::pipeline
