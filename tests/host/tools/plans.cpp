// The plans that dispatch/ chooses for the kernels in which warps multiply, for tests/test_tile_model.py: reads cases,
// writes a line each. (Traits of warpgroups do not compile without nvcc.)
//
//   in:  backend (80, 90)  role (0 key, 1 value)  head_dim  n  rows  longest tile, rows  bytes of a row of p
//        tiles  SMs  shared bytes
//   out: warps  stages  registers a thread
#include <cstdio>

#include "cute_kernels/dispatch/heuristics.hpp"
#include "cute_kernels/matmul/launch.hpp"
#include "cute_kernels/matmul/stage.hpp"
#include "cute_kernels/matmul/warp/traits.hpp"

using namespace cute_kernels;
using format::Role;

struct Case {
  int backend, role, head_dim, n, rows, longest, dense_row_bytes;
  long long tiles;
  int multiprocessors, shared_bytes;
};

template <class Traits>
void print_plan(Case const& c) {
  // As `limits` in the launchers, which only nvcc compiles: a tile's results take its block's place.
  constexpr int kKeyBytes = Traits::kN * format::kTileTokens * 4, kValueBytes = Traits::kAccumulators * 32 * 4;
  matmul::KernelLimits kernel{};
  if (c.backend == 80) {
    kernel.max_workers = Traits::kMaxWarps;
    kernel.fixed_shared_bytes = Traits::kIsKey ? 0 : 4 * Traits::kMaxWarps;
  } else {
    kernel.max_workers = 4 * (Traits::kRegisters <= 124 ? 4 : Traits::kRegisters <= 168 ? 3 : 2);
    kernel.fixed_shared_bytes = 1280;  // 144 barriers, 16 numbers
  }
  kernel.worker_warps = 1;
  kernel.one_ring = c.backend == 90;
  kernel.stages_ahead = 8;
  kernel.min_stages = matmul::sm80::kMinStages;
  kernel.max_stages = kernel.one_ring ? 48 : matmul::sm80::kMaxStages;
  kernel.min_block_bytes = Traits::kIsKey ? kKeyBytes : kernel.one_ring ? kValueBytes : kValueBytes / kernel.min_stages;
  dispatch::DeviceLimits device{c.multiprocessors, c.shared_bytes, 9, 0, true};
  auto plan =
      dispatch::choose_plan(device, kernel, c.n, c.rows, c.longest, matmul::kOrderBytes, c.dense_row_bytes, c.tiles);
  std::printf("%d %d %d\n", plan.config.workers, plan.stages.count, Traits::kRegisters);
}

template <Role kRole, int kHeadDim>
void visit_n(Case const& c) {
  if (c.n == 8)
    print_plan<matmul::Traits<kRole, cute::half_t, kHeadDim, 8>>(c);
  else
    print_plan<matmul::Traits<kRole, cute::half_t, kHeadDim, 16>>(c);
}

template <Role kRole>
void visit_head_dim(Case const& c) {
  if (c.head_dim == 64)
    visit_n<kRole, 64>(c);
  else if (c.head_dim == 128)
    visit_n<kRole, 128>(c);
  else
    visit_n<kRole, 256>(c);
}

int main() {
  Case c;
  while (std::scanf("%d %d %d %d %d %d %d %lld %d %d", &c.backend, &c.role, &c.head_dim, &c.n, &c.rows, &c.longest,
                    &c.dense_row_bytes, &c.tiles, &c.multiprocessors, &c.shared_bytes) == 10) {
    if (c.role == 0)
      visit_head_dim<Role::kKey>(c);
    else
      visit_head_dim<Role::kValue>(c);
  }
}
