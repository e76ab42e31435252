// The attention kernel of CC 8.x: every worker, two warps, fetches and multiplies the tiles of its own split.
#pragma once

#include "cute_kernels/ops/attention/mainloop.hpp"
#include "cute_kernels/ops/attention/sm80/pipeline.hpp"

namespace cute_kernels::attention::sm80 {

// As many as the register file of 65536 holds, in whole workers a scheduler.
template <class Traits>
inline constexpr int kMaxWarps = Traits::kRegisters <= 100 ? 16 : 8;

template <class Traits>
struct Storage {
  static constexpr int kMaxWorkers = kMaxWarps<Traits> / Traits::kWorkerWarps;
  static_assert(kMaxWorkers <= schedule::kMaxWorkers && kMaxWorkers <= pipeline::kMaxWorkerBarriers);

  SharedP<Traits> p[kMaxWorkers];
};
template <class Traits>
inline constexpr int kFixedBytes = (sizeof(Storage<Traits>) + 127) / 128 * 128;

template <class Traits>
__global__ void __launch_bounds__(32 * kMaxWarps<Traits>, 1) attention_kernel(CUTE_GRID_CONSTANT Params const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  ptx::launch_dependents();
  auto& storage = *reinterpret_cast<Storage<Traits>*>(shared);
  typename Traits::Schedule schedule(params.schedule, shared + kFixedBytes<Traits>);
  uint8_t* stages = shared + kFixedBytes<Traits> + params.schedule_bytes;
  schedule.prepare();
  schedule.prepare_splits();
  Worker<Traits> worker(threadIdx.x / 32);
  schedule::Range split = schedule.split_of_worker(worker.index);
  WorkerPipeline<Traits> pipeline(params, schedule, stages, worker, split);
  attend<Traits>(params, schedule, split, worker, storage.p[worker.index], pipeline);
}

}  // namespace cute_kernels::attention::sm80
