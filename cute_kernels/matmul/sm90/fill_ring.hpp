// The load side of a ring: up to four warps fill its stages by TMA. With one the products took over 500 clocks a tile,
// of which an SM has 450.
#pragma once

#include "cute_kernels/matmul/sm90/ring.hpp"

namespace cute_kernels::matmul::sm90 {

// Tiles of a CTA under way at most. Memory serves all requests at once: the fewer there are, the sooner the first tiles
// are complete.
inline constexpr int kTilesUnderWay = 12;
static_assert(kTilesUnderWay % (kMaxProducers * (kMaxProducers - 1)) == 0);  // so that a producer waits for its own

// As many turns for every worker; where a worker has no tile for its turn, the stage arrives empty. Slot(args, number)
// looks up where a tile lies, every lane one ahead of time;
//   void bring(args, uint8_t* stage, Barrier& full)  in one lane, starts the copies
template <class Slot, class... Args>
CUTE_DEVICE void fill_ring(StageRing const& ring, int producer, int turns, Args const&... args) {
  int lane = threadIdx.x % 32, producers = ring.shape.producers, end = turns * ring.shape.workers.divisor;
  if (producer >= producers) return ring.arrive();
  int fresh = min(ring.shape.producer_stages, 31);  // copies after which the first have to be waited for
  Slot mine, next;
  // From `fresh` of the 32 before the first, so that lookups are in one place: code is small, or late to arrive.
  for (int i = fresh, first = producer - 32 * producers; first < end; first += 32 * producers, i = 0) {
    mine = next;
    CUTE_NO_UNROLL
    for (; i < 32 && first + i * producers < end; ++i) {
      __syncwarp();  // a lane that still issues must not be left behind by lanes that wait
      if (i == fresh) next = Slot(args..., first + (32 + lane) * producers);
      if (first < 0) {
        ring.join();
        break;
      }
      RingPlace place = ring.place(first + i * producers), landing{place.stage - kTilesUnderWay, place.use};
      ring.wait_empty(place);
      if (landing.stage < 0) landing.stage += ring.shape.stages.divisor, --landing.use;
      // With fewer stages it has landed, for its stage has been taken again.
      if (landing.use >= 0 && ring.shape.stages.divisor >= kTilesUnderWay) ring.wait_full(landing);
      if (lane == i) mine.bring(args..., ring[place], ring.full(place));
    }
  }
}

}  // namespace cute_kernels::matmul::sm90
