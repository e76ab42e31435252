// The kernels of CC 9.0 in which warps multiply whole tiles (mma.sync), for few query rows: producer warps beside
// workers that each read their own piece's tiles from their own stages.
#pragma once

#include "cute_kernels/matmul/dense_tile.hpp"
#include "cute_kernels/matmul/sm90/finish_segments.hpp"
#include "cute_kernels/matmul/sm90/load.hpp"
#include "cute_kernels/matmul/sm90/roles.hpp"
#include "cute_kernels/matmul/warp/multiply_keys.hpp"
#include "cute_kernels/matmul/warp/multiply_values.hpp"

namespace cute_kernels::matmul::sm90 {

// By the registers that the compiler needs, which is less than Traits::kRegisters where it must.
template <class Traits>
inline constexpr int kMaxWarpgroups = Traits::kRegisters <= 124   ? 4
                                      : Traits::kRegisters <= 168 ? 3
                                                                  : 2;

inline constexpr int kMaxWorkers = 16;
inline constexpr int kWorkersBarrier = 0;

struct WarpStorage {
  RingBarriers barriers;
  int last_segment[kMaxWorkers];
};
inline constexpr int kWarpFixedBytes = (sizeof(WarpStorage) + 127) / 128 * 128;

template <class Traits>
class WarpPipeline {
 public:
  CUTE_DEVICE WarpPipeline(TmaParams const& params, StageRing const& ring, int worker, TileRange piece)
      : params_(params), ring_(ring), reader_(ring, worker), worker_(worker), dense_(params), tile_(piece.begin) {}

  CUTE_DEVICE Stage next() {
    Stage stage(params_.stages, reader_.wait());
    if constexpr (!Traits::kIsKey) {
      if (!params_.vectorized) {
        dense_.seek(tile_++);
        dense_.copy_rows(stage.dense_rows);
        __syncwarp();
      }
    }
    return stage;
  }

  CUTE_DEVICE void release() {
    // The copy that fills the stage next must overtake neither the loads nor, of keys, this warp's logits.
    cutlass::arch::fence_view_async_shared();
    reader_.release();
  }

  // Leaves this warp's share of its last segment in the stages, when the workers have read all tiles.
  template <class Fragment>
  CUTE_DEVICE void finish(Fragment const& tCrC /* (MMA,MMA_M,MMA_N) */, int rows) {
    sync_workers();
    leave_share<Traits>(tCrC, rows, reinterpret_cast<float4*>(ring_.data + worker_ * share_bytes<Traits>()));
  }

  CUTE_DEVICE void sync_workers() {
    cutlass::arch::NamedBarrier::sync(32 * ring_.shape.workers.divisor, kWorkersBarrier);
  }

 private:
  TmaParams const& params_;
  StageRing const& ring_;
  RingReader reader_;
  int worker_;
  DenseTile<Traits::kN> dense_;
  int tile_;
};

// Sets the CTA up; calls consume(pipeline, piece, warp, storage, ring) in the workers' warps.
template <class Traits, class Consume>
CUTE_DEVICE void run_warps(TmaParams const& params, uint8_t* shared, Consume&& consume) {
  auto& storage = *reinterpret_cast<WarpStorage*>(shared);
  StageRing ring{params.ring, storage.barriers, shared + kWarpFixedBytes, 1};
  if (!Traits::kIsKey && params.vectorized && threadIdx.x == 0)
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&params.dense_map));
  split_roles<kMaxWarpgroups<Traits>>(
      [&](int producer) { load_tiles<Traits::kIsKey, Traits::kN>(params, ring, producer); },
      [&] {
        // From a shuffle or not, by what the compiler then keeps in registers: neither way suits both roles.
        int warp = Traits::kIsKey ? __shfl_sync(~0u, threadIdx.x / 32, 0) : threadIdx.x / 32;
        bool works = warp < params.ring.workers.divisor;  // workers need not fill their last warpgroup
        if (works) ring.open(warp);
        ring.arrive();
        if (!works) return;
        TileRange piece = piece_of_worker(params, warp);
        WarpPipeline<Traits> pipeline(params, ring, warp, piece);
        consume(pipeline, piece, warp, storage, ring);
      });
}

template <class Traits>
__global__ void __launch_bounds__(kMaxThreads<kMaxWarpgroups<Traits>>, 1)
    sparse_qk_warps(CUTE_GRID_CONSTANT TmaParams const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  run_warps<Traits>(params, shared, [&](auto& pipeline, TileRange piece, auto&&...) {
    multiply_keys<Traits>(params, piece, pipeline);
  });
}

// kConverts: p is not in the type of V.
template <class Traits, bool kConverts>
__global__ void __launch_bounds__(kMaxThreads<kMaxWarpgroups<Traits>>, 1)
    sparse_av_warps(CUTE_GRID_CONSTANT TmaParams const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  ptx::launch_dependents();
  run_warps<Traits>(params, shared,
                    [&](auto& pipeline, TileRange piece, int warp, WarpStorage& storage, StageRing const& ring) {
                      SegmentSums<Traits> sums(params, threadIdx.x);
                      storage.last_segment[warp] = multiply_values<Traits, kConverts>(params, piece, pipeline);
                      if (params.work.by_segments)
                        return sums.write(reinterpret_cast<float4*>(ring.data), [&] { pipeline.sync_workers(); });
                      pipeline.sync_workers();
                      add_up_shares<Traits>(params, ring.data, share_bytes<Traits>(), storage.last_segment,
                                            params.ring.workers.divisor, threadIdx.x);
                    });
}

}  // namespace cute_kernels::matmul::sm90
