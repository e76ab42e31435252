// What the products' producers load: a bulk copy a tile's block, whole, another its token order; of sparse_av a tensor
// copy its columns of p, tokens in their own order: the order within the tile differs from tile to tile, which no
// tensor copy can follow.
#pragma once

#include "cute_kernels/ops/product/params.hpp"
#include "cute_kernels/ops/product/stage.hpp"
#include "cute_kernels/pipeline/bulk/fill_ring.hpp"
#include "cute_kernels/pipeline/bulk/params.hpp"
#include "cute_kernels/schedule/schedule.hpp"

namespace cute_kernels::product::sm90 {

using pipeline::StageRing;

inline constexpr int kStagesAhead = 8;  // at most, beyond one a worker: see dispatch/heuristics.hpp

// Params: a pipeline::RingParams. DenseLoad: what else comes with a tile, looked up by DenseLoad(params, work_tile,
// tile); `bytes(params)` says how many bytes `load(params, stage, barrier)` copies.
template <class Policy, class DenseLoad>
struct TileLoad {
  static constexpr bool kLimitsLater = true;

  int tile = -1;           // in the storage; -1: none
  int begin = 0, end = 0;  // rows of its block
  DenseLoad dense;

  TileLoad() = default;
  template <class Params>
  CUTE_DEVICE TileLoad(Params const& params, schedule::Schedule<Policy> const& schedule, int number) {
    int iteration, worker;
    params.ring.workers(iteration, worker, number);
    schedule::Range split = schedule.split_of_worker(worker);
    int in_schedule = split.begin + iteration;
    if (in_schedule >= split.end) return;
    tile = static_cast<int>(params.storage_tile(in_schedule));
    begin = __ldg(params.sparse.row_offsets + tile);
    end = __ldg(params.sparse.row_offsets + tile + 1);
    dense = DenseLoad(params, schedule.work_tile_with(in_schedule), in_schedule);
  }

  template <class Params, class Barrier>
  CUTE_DEVICE void load(Params const& params, schedule::Schedule<Policy> const&, uint8_t* to, Barrier& full) const {
    if (tile < 0) return full.arrive();
    Stage stage(params.stages, to);
    int bytes = (end - begin) * format::kRowBytes;
    full.arrive_and_expect_tx(bytes + kOrderBytes + dense.bytes(params));
    ptx::bulk_copy(stage.block, params.sparse.blocks + int64_t{begin} * format::kLanes, bytes, &full,
                   params.cache_policy);
    ptx::bulk_copy(stage.token_order, params.sparse.token_order + int64_t{tile} * kOrderBytes, kOrderBytes, &full,
                   params.cache_policy);
    dense.load(params, stage, full);
  }
};

// `producer`: of kMaxProducers.
template <class DenseLoad, class Params, class Policy>
CUTE_DEVICE void load_tiles(Params const& params, schedule::Schedule<Policy> const& schedule, StageRing const& ring,
                            int producer) {
  if (producer == 0) params.prefetch_row_offsets(params.sparse.row_offsets);
  pipeline::fill_ring<TileLoad<Policy, DenseLoad>>(ring, producer, schedule.longest_split(), params, schedule);
}

}  // namespace cute_kernels::product::sm90
