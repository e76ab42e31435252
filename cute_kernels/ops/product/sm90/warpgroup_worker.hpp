// The products on CC 9.0a where warpgroups multiply whole tiles (WGMMA), for many query rows: a warpgroup's index,
// split and ring reader, and the CTA's setup.
#pragma once

#include "cute_kernels/mma/warpgroup/traits.hpp"
#include "cute_kernels/ops/product/sm90/tile_load.hpp"

namespace cute_kernels::product::sm90 {

using mma::kWarpgroupThreads;
using pipeline::kWarpgroupWarps;

// Storage: of one warpgroup.
template <class Traits, class Storage>
struct WarpgroupsStorage {
  Storage warpgroup[Traits::kMaxWarpgroups];
  pipeline::RingBarriers barriers;
};

template <class Traits, class Storage>
inline constexpr int kWarpgroupsFixedBytes = (sizeof(WarpgroupsStorage<Traits, Storage>) + 127) / 128 * 128;

struct Warpgroup {
  int index;  // in the CTA
  int warp;   // in the warpgroup
  schedule::Range split;
  pipeline::RingReader reader;

  CUTE_DEVICE int thread() const { return threadIdx.x % kWarpgroupThreads; }
  CUTE_DEVICE void sync() const { pipeline::sync_worker(index, kWarpgroupThreads); }
};

// Sets the CTA up; calls work(schedule, warpgroup, storage) in the workers' warps.
template <class Traits, class Storage, class Policy, class DenseLoad, class Params, class Work>
CUTE_DEVICE void run_warpgroups(Params const& params, uint8_t* bytes, Work&& work) {
  auto& shared = *reinterpret_cast<WarpgroupsStorage<Traits, Storage>*>(bytes);
  StageRing ring{params.ring, shared.barriers, bytes + kWarpgroupsFixedBytes<Traits, Storage>, kWarpgroupWarps};
  schedule::Schedule<Policy> schedule(params.schedule, nullptr);
  pipeline::split_roles<Traits::kMaxWarpgroups>(
      [&](int producer) { load_tiles<DenseLoad>(params, schedule, ring, producer); },
      [&] {
        int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), index = warp / kWarpgroupWarps;
        if (warp % kWarpgroupWarps == 0) ring.open(index);
        ring.join();
        Warpgroup warpgroup{index, warp % kWarpgroupWarps, schedule.split_of_worker(index), {ring, index}};
        work(schedule, warpgroup, shared.warpgroup[index]);
      });
}

}  // namespace cute_kernels::product::sm90
