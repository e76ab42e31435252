// The load side of CC 9.0: four warps fill the workers' stages by TMA. With one the kernels took over 500
// clocks a tile, of which an SM has 450.
//
// A bulk copy brings a tile's block whole, another its token order; a tensor copy brings its columns of p, tokens in
// their own order: the order within the tile differs from tile to tile, which no tensor copy can follow.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/matmul/sm90/ring.hpp"

namespace cute_kernels::matmul::sm90 {

// A tile that a producer has to bring, and where its data lie: every lane looks one up ahead of time.
template <bool kIsKey, int kN>
struct Slot {
  int storage = -1;  // the tile in the storage; -1: none
  int stage = 0;
  uint32_t phase = 0;
  int begin = 0, rows = 0;
  int first_token = 0, first_row = 0, batch = 0;  // of p

  // A producer's workers take turns.
  CUTE_DEVICE Slot(StageRing const& ring, int producer, int index) {
    Work const& work = ring.params.work;
    int workers = (ring.params.workers - producer + kProducers - 1) / kProducers, turn = index / workers;
    int worker = producer + (index - turn * workers) * kProducers;
    TileRange piece = ring.piece(worker);
    int tile = piece.begin + turn;
    if (tile >= piece.end) return;
    int stages = ring.params.stages.count;
    stage = worker * stages + turn % stages, phase = turn / stages & 1;
    storage = static_cast<int>(storage_tile(work, tile));
    begin = __ldg(ring.params.sparse.row_offsets + storage);
    rows = __ldg(ring.params.sparse.row_offsets + storage + 1) - begin;
    if constexpr (!kIsKey) {
      Segment segment = segment_at<kN>(work, work.tiles_per_segment.div(tile));
      int kv_head;
      work.kv_heads(batch, kv_head, segment.head);
      first_row = kv_head * work.rows + segment.first_row;
      first_token = (tile - segment.tiles.begin) * format::kTileTokens;
    }
  }
};

// `producer`: of kProducers.
template <bool kIsKey, int kN>
CUTE_DEVICE void load_tiles(StageRing const& ring, int producer) {
  TmaParams const& params = ring.params;
  int lane = threadIdx.x % 32, workers = (params.workers - producer + kProducers - 1) / kProducers;
  if (workers == 0) return;
  int slots = workers * (params.work.tiles_per_piece + (params.work.spare_tiles > 0));
  auto policy = static_cast<uint64_t>(params.work.row_blocks.divisor == 1 ? TMA::CacheHintSm90::EVICT_FIRST
                                                                          : TMA::CacheHintSm90::EVICT_NORMAL);
  bool with_dense = !kIsKey && params.vectorized;
  int dense_bytes = with_dense ? params.box_rows * dense_row_bytes(params.dense.dtype) : 0;
  if (with_dense) prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.dense_map));
  Slot<kIsKey, kN> next(ring, producer, lane);
  for (int first = 0; first < slots; first += 32) {
    Slot<kIsKey, kN> mine = next;
    CUTE_NO_UNROLL
    for (int i = 0; i < min(32, slots - first); ++i) {
      __syncwarp();  // a lane that still issues must not be left behind by lanes that wait
      if (i == 1) next = Slot<kIsKey, kN>(ring, producer, first + 32 + lane);  // not before the first copy
      if (__shfl_sync(~0u, mine.storage, i) < 0) continue;                     // a piece that is a tile shorter
      int index = __shfl_sync(~0u, mine.stage, i);
      ring.barriers.empty[index].wait(__shfl_sync(~0u, mine.phase, i) ^ 1);  // a fresh stage counts as empty
      if (lane != i) continue;
      auto& full = ring.barriers.full[index];
      Stage stage = ring[index];
      int bytes = mine.rows * format::kRowBytes;
      full.arrive_and_expect_tx(bytes + kOrderBytes + dense_bytes);
      ptx::bulk_copy(stage.block, params.sparse.blocks + int64_t{mine.begin} * format::kLanes, bytes, &full, policy);
      ptx::bulk_copy(stage.token_order, params.sparse.token_order + int64_t{mine.storage} * kOrderBytes, kOrderBytes,
                     &full, policy);
      if (with_dense)
        SM90_TMA_LOAD_3D::copy(&params.dense_map, reinterpret_cast<uint64_t*>(&full),
                               static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL), stage.dense_rows,
                               mine.first_token, mine.first_row, mine.batch);
    }
  }
}

}  // namespace cute_kernels::matmul::sm90
