// The kernel of CC 8.x: every worker, a warp, fetches and multiplies the tiles of its own piece.
#pragma once

#include "cute_kernels/attention/mainloop.hpp"
#include "cute_kernels/attention/sm80/pipeline.hpp"

namespace cute_kernels::attention::sm80 {

// As many as the register file of 65536 holds, in whole workers a scheduler; 12 in place of 8 would not spill either,
// and have not been measured.
template <class Traits>
inline constexpr int kMaxWarps = Traits::kRegisters <= 100 ? 16 : 8;

template <class Traits>
struct Storage {
  static constexpr int kMaxWorkers = kMaxWarps<Traits> / Traits::kWorkerWarps;
  static_assert(kMaxWorkers <= attention::kMaxWorkers);

  Exchange<Traits> exchanges[kMaxWorkers];
};
template <class Traits>
inline constexpr int kFixedBytes = (sizeof(Storage<Traits>) + 127) / 128 * 128;

template <class Traits>
__global__ void __launch_bounds__(32 * kMaxWarps<Traits>, 1) attention_kernel(CUTE_GRID_CONSTANT Params const params) {
  extern __shared__ __align__(128) uint8_t shared[];
  ptx::launch_dependents();
  auto& storage = *reinterpret_cast<Storage<Traits>*>(shared);
  WorkLine<Traits> line(params, shared + kFixedBytes<Traits>);
  uint8_t* stages = shared + kFixedBytes<Traits> + params.line_bytes;
  line.prepare();
  line.deal_pieces();
  Worker<Traits> worker(threadIdx.x / 32);
  UnitRange piece = line.piece_of_worker(worker.index);
  WorkerPipeline<Traits> pipeline(params, line, stages, worker, piece);
  attend<Traits>(params, line, piece, worker, storage.exchanges[worker.index], pipeline);
}

}  // namespace cute_kernels::attention::sm80
