// A warpgroup's shared memory, and its place in the CTA.
#pragma once

#include "cute_kernels/matmul/sm90/load.hpp"
#include "cute_kernels/matmul/warpgroup/traits.hpp"

namespace cute_kernels::matmul::warpgroup {

using sm90::RingBarriers;
using sm90::RingReader;
using sm90::StageRing;
using sm90::TmaParams;

// Tiles take turns at places for their exponents: while some warps still read those of a tile and the tile before,
// others write those of the next.
inline constexpr int kTurns = 3;

template <class Traits>
struct WarpgroupStorage {
  alignas(1024) typename Traits::Element b[cosize_v<typename Traits::SmemLayoutB>];
  int seen[Traits::kN];              // largest exponents of the rows of p so far, see ProbabilityLoader
  int exponent[kTurns][Traits::kN];  // the same as of a tile
};

template <class Traits>
struct SharedStorage {
  WarpgroupStorage<Traits> warpgroup[Traits::kMaxWarpgroups];
  RingBarriers barriers;
};

template <class Traits>
inline constexpr int kFixedBytes = (sizeof(SharedStorage<Traits>) + 127) / 128 * 128;

struct Worker {
  int index;  // of the warpgroup in the CTA
  int warp;   // in the warpgroup
  TileRange piece;
  RingReader reader;

  CUTE_DEVICE int thread() const { return threadIdx.x % kWarpgroupThreads; }
  CUTE_DEVICE void sync() const { cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, index); }
};

}  // namespace cute_kernels::matmul::warpgroup
