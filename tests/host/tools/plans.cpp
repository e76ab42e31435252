// The plans that dispatch/ chooses for the kernels in which warps multiply, for tests/profiling/test_tile_model.py:
// reads cases, writes a line each. (Traits of warpgroups do not compile without nvcc.)
//
//   in:  backend (80, 90)  role (0 key, 1 value)  head_dim  n  rows  longest tile, rows  bytes of a row of p
//        tiles  SMs  shared bytes
//   out: warps  stages  registers a thread
// include: tests/host/emulated
#include <cstdio>

#include "cute_kernels/dispatch/heuristics.hpp"
#include "cute_kernels/format/head_dim.hpp"
#include "cute_kernels/mma/warp/traits.hpp"
#include "cute_kernels/ops/product/stage.hpp"

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
  pipeline::KernelLimits kernel{};
  if (c.backend == 80) {
    kernel.max_workers = Traits::kMaxWarps;
  } else {
    kernel.max_workers = 4 * (Traits::kRegisters <= 124 ? 4 : Traits::kRegisters <= 168 ? 3 : 2);
    kernel.fixed_shared_bytes = 1152;  // 144 barriers
  }
  kernel.worker_warps = 1;
  kernel.one_ring = c.backend == 90;
  kernel.stages_ahead = 8;
  kernel.min_stages = 2;
  kernel.max_stages = kernel.one_ring ? 48 : 3;
  kernel.min_block_bytes = Traits::kIsKey ? kKeyBytes : kernel.one_ring ? kValueBytes : 0;
  DeviceLimits device{c.multiprocessors, c.shared_bytes, 9, 0, true};
  auto plan =
      dispatch::choose_plan(device, kernel, c.n, c.rows, c.longest, product::kOrderBytes, c.dense_row_bytes, c.tiles);
  std::printf("%d %d %d\n", plan.config.workers, plan.stages.count, Traits::kRegisters);
}

using Stored = mma::StoredOperand<format::BitmapTile, format::Fp16Codec, cute::half_t>;

template <Role kRole>
void print_role(Case const& c) {
  format::visit_head_dim(c.head_dim, [&](auto head_dim) {
    if (c.n == 8)
      print_plan<mma::WarpTraits<kRole, Stored, head_dim(), 8>>(c);
    else
      print_plan<mma::WarpTraits<kRole, Stored, head_dim(), 16>>(c);
  });
}

int main() {
  Case c;
  while (std::scanf("%d %d %d %d %d %d %d %lld %d %d", &c.backend, &c.role, &c.head_dim, &c.n, &c.rows, &c.longest,
                    &c.dense_row_bytes, &c.tiles, &c.multiprocessors, &c.shared_bytes) == 10) {
    if (c.role == 0)
      print_role<Role::kKey>(c);
    else
      print_role<Role::kValue>(c);
  }
}
