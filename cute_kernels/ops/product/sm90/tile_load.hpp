// What the products' producers load: a bulk copy a tile's block, whole, another its token order; of sparse_av a tensor
// copy its columns of p, tokens in their own order: the order within the tile differs from tile to tile, which no
// tensor copy can follow.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_kernels/ops/product/params.hpp"
#include "cute_kernels/ops/product/stage.hpp"
#include "cute_kernels/pipeline/bulk/fill_ring.hpp"
#include "cute_kernels/pipeline/bulk/params.hpp"
#include "cute_kernels/schedule/schedule.hpp"

namespace cute_kernels::product::sm90 {

using pipeline::StageRing;

inline constexpr int kStagesAhead = 8;  // at most, beyond one a worker: see dispatch/heuristics.hpp

// Params: a pipeline::RingParams. DenseLoad: what else comes with a tile, looked up by DenseLoad(params, work_tile,
// tile); `bytes(params)` says how many bytes `load(params, stage, barrier)` copies, kFirstInFlight how many tiles a
// producer has in flight at first.
template <class Policy, class DenseLoad>
struct TileLoad {
  int tile = -1;           // in the storage; -1: none
  int begin = 0, end = 0;  // rows of its block
  DenseLoad dense;

  CUTE_DEVICE static int first_in_flight(pipeline::RingShape const& shape) {
    return DenseLoad::kFirstInFlight * shape.producers;
  }
  // Large tiles come more slowly if more are in flight; of small ones so many would be too few bytes.
  CUTE_DEVICE static int in_flight(pipeline::RingShape const& shape) {
    constexpr int kInFlight = 12, kLargeStage = (64 << 10) / kInFlight;
    static_assert(kInFlight % (pipeline::kMaxProducers * (pipeline::kMaxProducers - 1)) == 0);  // producers divide it
    return shape.stages >= kInFlight && shape.stage_bytes >= kLargeStage ? kInFlight : 0;
  }

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
    using cute::TMA::CacheHintSm90;
    if (tile < 0) return full.arrive();
    bool read_once = params.schedule.row_blocks.divisor == 1;
    auto policy = static_cast<uint64_t>(read_once ? CacheHintSm90::EVICT_FIRST : CacheHintSm90::EVICT_NORMAL);
    Stage stage(params.stages, to);
    int bytes = (end - begin) * format::kRowBytes;
    full.arrive_and_expect_tx(bytes + kOrderBytes + dense.bytes(params));
    ptx::bulk_copy(stage.block, params.sparse.blocks + int64_t{begin} * format::kLanes, bytes, &full, policy);
    ptx::bulk_copy(stage.token_order, params.sparse.token_order + int64_t{tile} * kOrderBytes, kOrderBytes, &full,
                   policy);
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
