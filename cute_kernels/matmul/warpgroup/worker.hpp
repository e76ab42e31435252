// A warpgroup's shared memory, and its place in the CTA.
#pragma once

#include "cute_kernels/matmul/sm90/load.hpp"
#include "cute_kernels/matmul/warpgroup/logits_layout.hpp"
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
struct ValueStorage {
  alignas(1024) typename Traits::Element b[cosize_v<typename Traits::SmemLayoutB>];
  int seen[Traits::kN];              // largest exponents of the rows of p so far, see ProbabilityLoader
  int exponent[kTurns][Traits::kN];  // the same as of a tile
};

template <class Traits>
struct KeyStorage {
  alignas(1024) typename Traits::Element b[cosize_v<typename Traits::SmemLayoutB>];
  uint128_t logits[2][kLogitsUnits<Traits::kN>];  // see LogitsWriter
};

template <class Traits>
using WarpgroupStorage = std::conditional_t<Traits::kIsKey, KeyStorage<Traits>, ValueStorage<Traits>>;

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
  CUTE_DEVICE void sync() const {
    ptx::compiler_fence();  // the library's barrier does not say that it orders memory
    cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, index);
    ptx::compiler_fence();
  }
};

// Sets the CTA up; calls work(worker) in the workers' warps.
template <class Traits, class Work>
CUTE_DEVICE void run_warpgroups(TmaParams const& params, uint8_t* bytes, Work&& work) {
  auto& shared = *reinterpret_cast<SharedStorage<Traits>*>(bytes);
  StageRing ring{params.ring, shared.barriers, bytes + kFixedBytes<Traits>, kWarpgroupWarps};
  sm90::split_roles<Traits::kMaxWarpgroups>(
      [&](int producer) { sm90::load_tiles<Traits::kIsKey, Traits::kN>(params, ring, producer); },
      [&] {
        int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), index = warp / kWarpgroupWarps;
        if (warp % kWarpgroupWarps == 0) ring.open(index);
        ring.join();
        Worker worker{index, warp % kWarpgroupWarps, sm90::piece_of_worker(params, index), {ring, index}};
        work(worker, shared.warpgroup[index]);
      });
}

}  // namespace cute_kernels::matmul::warpgroup
