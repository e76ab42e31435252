// The load side of CC 9.0: four warps fill the workers' stages by bulk copies (TMA), a tile's block and its token
// orders each with one.
#pragma once

#include "cute_kernels/attention/sm90/ring.hpp"

namespace cute_kernels::attention::sm90 {

// A stage that a producer has to fill, and with what: every lane looks one up ahead of time.
template <int N>
struct Slot {
  int stage = -1;  // -1: none
  uint32_t phase = 0;
  bool is_value = false;
  bool waits = false;                     // for the stage before to arrive
  int tile = 0, first_row = 0, rows = 0;  // no rows: a unit of the window

  // A producer's workers take turns.
  CUTE_DEVICE Slot(StageRing const& ring, WorkLine<N> const& line, int producer, int index) {
    Params const& params = ring.params;
    int workers = (params.workers - producer + kProducers - 1) / kProducers, turn = index / workers;
    int worker = producer + (index - turn * workers) * kProducers;
    UnitRange piece = line.piece(worker);
    int unit = piece.begin + turn / 2;
    if (unit >= piece.end) return;
    stage = worker * params.stages.count + turn % params.stages.count, phase = turn / params.stages.count & 1;
    is_value = turn % 2;
    waits = turn > 0 && turn < params.stages.count;
    StageSource source(params, line.segment_with(unit), unit, is_value);
    if (source.tile < 0) return;
    tile = static_cast<int>(source.tile);
    first_row = static_cast<int>(source.view(params).first_row(tile));
    rows = source.view(params).rows(tile);
  }
};

// `producer`: of kProducers.
template <int N>
CUTE_DEVICE void load_tiles(StageRing const& ring, WorkLine<N> const& line, int producer) {
  Params const& params = ring.params;
  int lane = threadIdx.x % 32, workers = (params.workers - producer + kProducers - 1) / kProducers;
  if (workers <= 0) return;
  int longest = 0;
  for (int worker = producer; worker < params.workers; worker += kProducers)
    longest = max(longest, line.piece(worker).end - line.piece(worker).begin);
  int slots = workers * 2 * longest;
  auto policy = static_cast<uint64_t>(params.row_blocks.divisor == 1 ? TMA::CacheHintSm90::EVICT_FIRST
                                                                     : TMA::CacheHintSm90::EVICT_NORMAL);
  Slot<N> next(ring, line, producer, lane);
  for (int first = 0; first < slots; first += 32) {
    Slot<N> mine = next;
    CUTE_NO_UNROLL
    for (int i = 0; i < min(32, slots - first); ++i) {
      __syncwarp();  // a lane that still issues must not be left behind by lanes that wait
      if (i == 1) next = Slot<N>(ring, line, producer, first + 32 + lane);  // not before the first copy
      int index = __shfl_sync(~0u, mine.stage, i);
      if (index < 0) continue;                                               // a piece that is a unit shorter
      ring.barriers.empty[index].wait(__shfl_sync(~0u, mine.phase, i) ^ 1);  // a fresh stage counts as empty
      // At the start all SMs ask at once: what is wanted first has to come first.
      if (__shfl_sync(~0u, mine.waits, i)) ring.barriers.full[index - 1].wait(0);
      if (lane != i) continue;
      auto& full = ring.barriers.full[index];
      Stage stage = ring[index];
      int bytes = mine.rows * format::kRowBytes;
      bool own_order = !mine.is_value || params.erases, value_order = !mine.is_value && params.own_orders;
      if (bytes == 0) {
        full.arrive();
        continue;
      }
      full.arrive_and_expect_tx(bytes + (own_order + value_order) * kOrderBytes);
      format::SparseView const& view = mine.is_value ? params.values : params.keys;
      ptx::bulk_copy(stage.block, view.blocks + int64_t{mine.first_row} * format::kLanes, bytes, &full, policy);
      int64_t order = int64_t{mine.tile} * kOrderBytes;
      if (own_order) ptx::bulk_copy(stage.token_order, view.token_order + order, kOrderBytes, &full, policy);
      if (value_order) ptx::bulk_copy(stage.value_order, params.values.token_order + order, kOrderBytes, &full, policy);
    }
  }
}

}  // namespace cute_kernels::attention::sm90
