// What the products' producers bring: a bulk copy a tile's block, whole, another its token order; a tensor copy its
// columns of p, tokens in their own order: the order within the tile differs from tile to tile, which no tensor copy
// can follow.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_kernels/matmul/sm90/fill_ring.hpp"
#include "cute_kernels/matmul/sm90/params.hpp"
#include "cute_kernels/matmul/stage.hpp"
#include "cute_kernels/matmul/tile_scheduler.hpp"

namespace cute_kernels::matmul::sm90 {

inline constexpr int kStagesAhead = 8;  // at most, beyond one a worker: see dispatch/heuristics.hpp

CUTE_DEVICE TileRange piece_of_worker(TmaParams const& params, int worker) {
  return piece_tiles(params.work, blockIdx.x * params.ring.workers.divisor + worker);
}

template <bool kIsKey, int kN>
struct Slot {
  int tile = -1;                                  // in the storage; -1: none
  int begin = 0, end = 0;                         // rows of its block
  int first_token = 0, first_row = 0, batch = 0;  // of p

  Slot() = default;
  CUTE_DEVICE Slot(TmaParams const& params, int number) {
    Work const& work = params.work;
    int turn, worker;
    params.ring.workers(turn, worker, number);
    TileRange piece = piece_of_worker(params, worker);
    int in_line = piece.begin + turn;
    if (in_line >= piece.end) return;
    tile = static_cast<int>(storage_tile(work, in_line));
    begin = __ldg(params.sparse.row_offsets + tile);
    end = __ldg(params.sparse.row_offsets + tile + 1);
    if constexpr (!kIsKey) {
      Segment segment = segment_at<kN>(work, work.tiles_per_segment.div(in_line));
      int kv_head;
      work.kv_heads(batch, kv_head, segment.head);
      first_row = kv_head * work.rows + segment.first_row;
      first_token = (in_line - segment.tiles.begin) * format::kTileTokens;
    }
  }

  template <class Barrier>
  CUTE_DEVICE void bring(TmaParams const& params, uint8_t* to, Barrier& full) const {
    if (tile < 0) return full.arrive();
    auto policy = static_cast<uint64_t>(params.work.row_blocks.divisor == 1 ? TMA::CacheHintSm90::EVICT_FIRST
                                                                            : TMA::CacheHintSm90::EVICT_NORMAL);
    bool with_dense = !kIsKey && params.vectorized;
    Stage stage(params.stages, to);
    int bytes = (end - begin) * format::kRowBytes;
    int dense_bytes = with_dense ? params.box_rows * dense_row_bytes(params.dense.dtype) : 0;
    full.arrive_and_expect_tx(bytes + kOrderBytes + dense_bytes);
    ptx::bulk_copy(stage.block, params.sparse.blocks + int64_t{begin} * format::kLanes, bytes, &full, policy);
    ptx::bulk_copy(stage.token_order, params.sparse.token_order + int64_t{tile} * kOrderBytes, kOrderBytes, &full,
                   policy);
    if (with_dense)
      SM90_TMA_LOAD_3D::copy(&params.dense_map, reinterpret_cast<uint64_t*>(&full),
                             static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL), stage.dense_rows, first_token,
                             first_row, batch);
  }
};

// `producer`: of kMaxProducers.
template <bool kIsKey, int kN>
CUTE_DEVICE void load_tiles(TmaParams const& params, StageRing const& ring, int producer) {
  if (producer == 0) params.first_tiles.prefetch(params.sparse.row_offsets);
  int turns = params.work.tiles_per_piece + (params.work.spare_tiles > 0);
  fill_ring<Slot<kIsKey, kN>>(ring, producer, turns, params);
}

}  // namespace cute_kernels::matmul::sm90
