// The load side of CC 8.x: every worker owns a ring of stages in shared memory, which its warps fill together with
// cp.async. A ring of n stages has n - 1 under way while one is read.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "cute_kernels/attention/combine.hpp"
#include "cute_kernels/attention/stage.hpp"
#include "cute_kernels/common/ptx.hpp"

namespace cute_kernels::attention::sm80 {

inline constexpr int kMinStages = 2, kMaxStages = 3;  // of a worker

template <class Traits>
class WorkerPipeline {
 public:
  static constexpr bool kJoinsSegments = false;

  // Starts the fetch of the first stages.
  CUTE_DEVICE WorkerPipeline(Params const& params, WorkLine<Traits> const& line, uint8_t* shared,
                             Worker<Traits> const& worker, UnitRange piece)
      : params_(params), line_(line), shared_(shared), worker_(worker), piece_(piece) {
    look_up();
    for (int i = 0; i < params.stages.count - 1; ++i) fetch(i);
  }

  // Waits for the worker's next stage and starts the fetch into the one that was read last.
  CUTE_DEVICE Stage next() {
    static_assert(kMinStages == 2 && kMaxStages == 3, "a group for every fetch that may still be under way");
    if (params_.stages.count == 2)
      cp_async_wait<0>();
    else
      cp_async_wait<1>();
    worker_.sync();  // every thread's copies have arrived, and every one has read the stage before
    Stage stage = stage_at(read_stage_);
    int free = read_stage_ == 0 ? params_.stages.count - 1 : read_stage_ - 1;
    read_stage_ = read_stage_ + 1 == params_.stages.count ? 0 : read_stage_ + 1;
    fetch(free);
    return stage;
  }

  // The stage has been read; the fetch after next fills it, when the worker's warps have met.
  CUTE_DEVICE void release(bool = false) {}

 private:
  static constexpr int kCopyBytes = 16;

  Params const& params_;
  WorkLine<Traits> const& line_;
  uint8_t* shared_;
  Worker<Traits> const& worker_;
  UnitRange piece_;
  int turn_ = 0;  // the stage to fetch next: keys and values of a unit in turn
  int read_stage_ = 0;
  int rows_ = 0, first_row_ = 0,
      tile_ = -1;  // lane i: of the i-th of 32 stages, so that no fetch waits for its offsets

  CUTE_DEVICE Stage stage_at(int index) const {
    return {params_.stages, shared_ + (worker_.index * params_.stages.count + index) * params_.stages.stage_bytes};
  }

  CUTE_DEVICE void look_up() {
    int turn = turn_ + threadIdx.x % 32, unit = piece_.begin + turn / 2;
    tile_ = -1;
    if (unit >= piece_.end) return;
    Segment segment = line_.segment_with(unit);
    StageSource<Traits> source(params_, segment, segment.unit_map(), unit, turn % 2);
    if (source.tile < 0) return;
    format::SparseView const& view = source.view(params_);
    tile_ = static_cast<int>(source.tile);
    first_row_ = static_cast<int>(view.first_row(source.tile));
    rows_ = view.rows(source.tile);
  }

  // Fills a stage. Always commits a group, so that groups count stages.
  CUTE_DEVICE void fetch(int into) {
    int slot = turn_ % 32, tile = __shfl_sync(~0u, tile_, slot), rows = __shfl_sync(~0u, rows_, slot);
    int first_row = __shfl_sync(~0u, first_row_, slot);
    if (tile >= 0) {
      Stage stage = stage_at(into);
      bool is_value = turn_ % 2;
      fetch_block(stage.block, (is_value ? params_.values : params_.keys).blocks + int64_t{first_row} * format::kLanes,
                  rows);
      if (!is_value) fetch_order(stage.token_order, params_.keys, tile);
      if (is_value && params_.erases) fetch_order(stage.token_order, params_.values, tile);
      if (!is_value && params_.own_orders) fetch_order(stage.value_order, params_.values, tile);
    }
    if (++turn_ % 32 == 0) look_up();
    cp_async_fence();
  }

  // Read once a pass: evict-first. The loop is unrolled by hand so that a copy costs a predicate and an LDGSTS.
  CUTE_DEVICE void fetch_block(uint8_t* block, uint32_t const* rows_from, int rows) {
    constexpr int kUnroll = 2, kStep = Traits::kWorkerThreads * kCopyBytes;
    int thread = threadIdx.x % Traits::kWorkerThreads;
    auto const* from = reinterpret_cast<uint8_t const*>(rows_from) + thread * kCopyBytes;
    uint32_t to = cast_smem_ptr_to_uint(block) + thread * kCopyBytes;
    int bytes = rows * format::kRowBytes - thread * kCopyBytes;  // from this thread's first copy on
    uint64_t policy = ptx::evict_first_policy();
    CUTE_NO_UNROLL
    for (; bytes > (kUnroll - 1) * kStep; bytes -= kUnroll * kStep, from += kUnroll * kStep, to += kUnroll * kStep) {
      CUTE_UNROLL
      for (int i = 0; i < kUnroll; ++i) ptx::cp_async_16_hint(to + i * kStep, from + i * kStep, policy);
    }
    CUTE_UNROLL
    for (int i = 0; i < kUnroll - 1; ++i)
      if (bytes > i * kStep) ptx::cp_async_16_hint(to + i * kStep, from + i * kStep, policy);
  }

  CUTE_DEVICE void fetch_order(uint8_t* order, format::SparseView const& view, int tile) {
    int lane = threadIdx.x % Traits::kWorkerThreads;
    if (lane < kOrderBytes / kCopyBytes)
      ptx::cp_async_16(cast_smem_ptr_to_uint(order) + lane * kCopyBytes,
                       view.token_order + int64_t{tile} * kOrderBytes + lane * kCopyBytes, kCopyBytes);
  }
};

}  // namespace cute_kernels::attention::sm80
