// The load side of CC 8.x: every warp owns a ring of stages in shared memory and fills it with cp.async.
//
// Warps never wait for one another: a warp fetches, waits for and consumes its own tiles, so that many warps at
// different points hide one another's latencies. A ring of n stages has n - 1 tiles under way while one is multiplied.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/matmul/combine.hpp"
#include "cute_kernels/matmul/dense_tile.hpp"
#include "cute_kernels/matmul/launch.hpp"
#include "cute_kernels/matmul/warp/traits.hpp"

namespace cute_kernels::matmul::sm80 {

template <class Traits>
class WarpPipeline {
 public:
  // Starts the fetch of the first tiles of this warp's piece.
  CUTE_DEVICE WarpPipeline(Params const& params, uint8_t* shared, int warp, TileRange piece)
      : params_(params),
        ring_(shared + warp * params.stages.count * params.stages.stage_bytes),
        lane_(threadIdx.x % 32),
        policy_(ptx::evict_first_policy()),
        piece_(piece),
        next_(piece.begin),
        dense_(params) {
    load_row_offsets();
    for (int i = 0; i < params.stages.count - 1; ++i) fetch();
  }

  // Waits for the warp's next tile, starts the fetch into the stage that was read last, and returns the tile's stage.
  CUTE_DEVICE Stage next() {
    static_assert(kMinStages == 2 && kMaxStages == 3, "a group for every fetch that may still be under way");
    if (params_.stages.count == 2)
      cp_async_wait<0>();
    else
      cp_async_wait<1>();
    __syncwarp();  // every lane's copies have arrived, and every lane has read the stage before
    Stage stage = stage_at(read_stage_);
    read_stage_ = read_stage_ + 1 == params_.stages.count ? 0 : read_stage_ + 1;
    fetch();
    return stage;
  }

  // The stage has been read; the next fetch but one fills it.
  CUTE_DEVICE void release() {}

  // Leaves this warp's share of its last segment in its stages.
  template <class Fragment>
  CUTE_DEVICE void finish(Fragment const& tCrC /* (MMA,MMA_M,MMA_N) */, int rows) {
    __syncwarp();  // all its tiles have been read
    leave_share<Traits>(tCrC, rows, reinterpret_cast<float4*>(ring_));
  }

 private:
  static constexpr int kCopyBytes = 16;

  Params const& params_;
  uint8_t* ring_;
  int lane_;
  uint64_t policy_;
  TileRange piece_;
  int next_;  // the tile to fetch
  DenseTile<Traits::kN> dense_;
  int fetch_stage_ = 0, read_stage_ = 0;
  int rows_begin_ = 0, rows_end_ = 0;  // lane i: of the i-th of 32 tiles, so that no fetch waits for its offsets

  CUTE_DEVICE Stage stage_at(int index) const { return {params_.stages, ring_ + index * params_.stages.stage_bytes}; }

  // Fills the next stage with the warp's next tile. Always commits a group, so that groups count tiles.
  CUTE_DEVICE void fetch() {
    if (next_ < piece_.end) {
      Stage stage = stage_at(fetch_stage_);
      fetch_block(stage.block);
      fetch_token_order(stage.token_order);
      if constexpr (!Traits::kIsKey) fetch_dense(stage.dense_rows);
      if ((++next_ - piece_.begin) % 32 == 0) load_row_offsets();
    }
    cp_async_fence();
    fetch_stage_ = fetch_stage_ + 1 == params_.stages.count ? 0 : fetch_stage_ + 1;
  }

  CUTE_DEVICE void load_row_offsets() {
    if (next_ + lane_ >= piece_.end) return;
    int64_t tile = storage_tile(params_.work, next_ + lane_);
    rows_begin_ = __ldg(params_.sparse.row_offsets + tile);
    rows_end_ = __ldg(params_.sparse.row_offsets + tile + 1);
  }

  // Read once a pass: evict-first. The loop is unrolled by hand so that a copy costs a predicate and an LDGSTS.
  CUTE_DEVICE void fetch_block(uint8_t* block) {
    constexpr int kUnroll = 4, kStep = 32 * kCopyBytes;
    int slot = (next_ - piece_.begin) % 32;
    int begin = __shfl_sync(~0u, rows_begin_, slot), end = __shfl_sync(~0u, rows_end_, slot);
    auto const* from = reinterpret_cast<uint8_t const*>(params_.sparse.blocks) + int64_t{begin} * format::kRowBytes;
    from += lane_ * kCopyBytes;
    uint32_t to = cast_smem_ptr_to_uint(block) + lane_ * kCopyBytes;
    int bytes = (end - begin) * format::kRowBytes - lane_ * kCopyBytes;  // from this lane's first copy on
    CUTE_NO_UNROLL
    for (; bytes > (kUnroll - 1) * kStep; bytes -= kUnroll * kStep, from += kUnroll * kStep, to += kUnroll * kStep) {
      CUTE_UNROLL
      for (int i = 0; i < kUnroll; ++i) ptx::cp_async_16_hint(to + i * kStep, from + i * kStep, policy_);
    }
    CUTE_UNROLL
    for (int i = 0; i < kUnroll - 1; ++i)
      if (bytes > i * kStep) ptx::cp_async_16_hint(to + i * kStep, from + i * kStep, policy_);
  }

  CUTE_DEVICE void fetch_token_order(uint8_t* order) {
    if (lane_ < kOrderBytes / kCopyBytes)
      ptx::cp_async_16(
          cast_smem_ptr_to_uint(order) + lane_ * kCopyBytes,
          params_.sparse.token_order + storage_tile(params_.work, next_) * kOrderBytes + lane_ * kCopyBytes,
          kCopyBytes);
  }

  CUTE_DEVICE void fetch_dense(uint8_t* rows) {
    dense_.seek(next_);
    if (!params_.vectorized) return dense_.copy_rows(rows);
    int valid_bytes = dense_.tokens() * dtype_bytes(params_.dense.dtype);
    int row_bytes = dense_row_bytes(params_.dense.dtype);
    int log_copies = dtype_bytes(params_.dense.dtype) == 4 ? 4 : 3;  // 16-byte copies of a row
    CUTE_NO_UNROLL
    for (int i = lane_; i < dense_.rows() << log_copies; i += 32) {
      int row = i >> log_copies, offset = (i & ((1 << log_copies) - 1)) * kCopyBytes;
      int valid = max(0, min(kCopyBytes, valid_bytes - offset));
      ptx::cp_async_16(cast_smem_ptr_to_uint(rows + row * row_bytes + offset), dense_.row(row) + (valid ? offset : 0),
                       valid);
    }
  }
};

}  // namespace cute_kernels::matmul::sm80
