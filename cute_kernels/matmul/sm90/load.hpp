// The load side of CC 9.0: up to four warps fill the ring of stages by TMA. With one the kernels took over 500 clocks a
// tile, of which an SM has 450.
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
  RingPlace place;
  int begin = 0, end = 0;                         // rows of its block
  int first_token = 0, first_row = 0, batch = 0;  // of p

  CUTE_DEVICE Slot(StageRing const& ring, int number) : place(ring.place(number)) {
    Work const& work = ring.params.work;
    int turn, worker;
    ring.params.workers(turn, worker, number);
    TileRange piece = ring.piece(worker);
    int tile = piece.begin + turn;
    if (tile >= piece.end) return;
    storage = static_cast<int>(storage_tile(work, tile));
    begin = __ldg(ring.params.sparse.row_offsets + storage);
    end = __ldg(ring.params.sparse.row_offsets + storage + 1);
    if constexpr (!kIsKey) {
      Segment segment = segment_at<kN>(work, work.tiles_per_segment.div(tile));
      int kv_head;
      work.kv_heads(batch, kv_head, segment.head);
      first_row = kv_head * work.rows + segment.first_row;
      first_token = (tile - segment.tiles.begin) * format::kTileTokens;
    }
  }
};

// Tiles of a CTA under way at most. Memory serves all requests at once: the fewer there are, the sooner the first tiles
// are complete.
inline constexpr int kTilesUnderWay = 12;
static_assert(kTilesUnderWay % (kMaxProducers * (kMaxProducers - 1)) == 0);  // so that a producer waits for its own

// `producer`: of kMaxProducers.
template <bool kIsKey, int kN>
CUTE_DEVICE void load_tiles(StageRing const& ring, int producer) {
  TmaParams const& params = ring.params;
  int lane = threadIdx.x % 32, producers = params.producers;
  if (producer >= producers) return ring.arrive();
  int end = params.workers.divisor * (params.work.tiles_per_piece + (params.work.spare_tiles > 0));
  auto policy = static_cast<uint64_t>(params.work.row_blocks.divisor == 1 ? TMA::CacheHintSm90::EVICT_FIRST
                                                                          : TMA::CacheHintSm90::EVICT_NORMAL);
  bool with_dense = !kIsKey && params.vectorized;
  int dense_bytes = with_dense ? params.box_rows * dense_row_bytes(params.dense.dtype) : 0;
  int fresh = min(params.ring_stages.divisor / producers, 31);  // copies after which the first have to be waited for
  Slot<kIsKey, kN> next(ring, producer + lane * producers);
  ring.join();
  for (int first = producer; first < end; first += 32 * producers) {
    Slot<kIsKey, kN> mine = next;
    CUTE_NO_UNROLL
    for (int i = 0; i < 32 && first + i * producers < end; ++i) {
      __syncwarp();  // a lane that still issues must not be left behind by lanes that wait
      if (i == fresh) next = Slot<kIsKey, kN>(ring, first + (32 + lane) * producers);
      if (__shfl_sync(~0u, mine.storage, i) < 0) continue;  // a piece that is a tile shorter
      RingPlace place{__shfl_sync(~0u, mine.place.stage, i), __shfl_sync(~0u, mine.place.use, i)};
      ring.wait_empty(place);
      int landing = first + i * producers - kTilesUnderWay;
      if (landing >= 0 && landing < params.workers.divisor * params.work.tiles_per_piece)  // which no piece lacks
        ring.wait_full(ring.place(landing));
      if (lane != i) continue;
      auto& full = ring.full(place);
      Stage stage = ring[place.stage];
      int bytes = (mine.end - mine.begin) * format::kRowBytes;
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
