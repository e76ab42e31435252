// Copies of CC 8.x: threads copy 16 bytes at a time with cp.async into stages that they own.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/pipeline/config.hpp"

namespace cute_kernels::pipeline {

inline constexpr int kMinCpAsyncStages = 2, kMaxCpAsyncStages = 3;  // of a worker
inline constexpr int kCpAsyncBytes = 16;

// `bytes` of a block, a multiple of 16, with kThreads threads, of which this is `thread`. A block is read once a pass:
// evict-first. The loop is unrolled by hand so that a copy costs a predicate and an LDGSTS.
template <int kThreads, int kUnroll>
CUTE_DEVICE void copy_block_async(uint8_t* to_block, void const* from_block, int bytes, int thread, uint64_t policy) {
  constexpr int kStep = kThreads * kCpAsyncBytes;
  auto const* from = static_cast<uint8_t const*>(from_block) + thread * kCpAsyncBytes;
  uint32_t to = cute::cast_smem_ptr_to_uint(to_block) + thread * kCpAsyncBytes;
  bytes -= thread * kCpAsyncBytes;  // from this thread's first copy on
  CUTE_NO_UNROLL
  for (; bytes > (kUnroll - 1) * kStep; bytes -= kUnroll * kStep, from += kUnroll * kStep, to += kUnroll * kStep) {
    CUTE_UNROLL
    for (int i = 0; i < kUnroll; ++i) ptx::cp_async_16_hint(to + i * kStep, from + i * kStep, policy);
  }
  CUTE_UNROLL
  for (int i = 0; i < kUnroll - 1; ++i)
    if (bytes > i * kStep) ptx::cp_async_16_hint(to + i * kStep, from + i * kStep, policy);
}

// A token order of 64 bytes.
CUTE_DEVICE void copy_order_async(uint8_t* to, uint8_t const* from, int thread) {
  if (thread < format::kTileTokens / kCpAsyncBytes)
    ptx::cp_async_16(cute::cast_smem_ptr_to_uint(to) + thread * kCpAsyncBytes, from + thread * kCpAsyncBytes,
                     kCpAsyncBytes);
}

// A worker's stages, read in turn: with n of them n - 1 are in flight while one is read. Every fetch commits a group,
// also an empty one, so that groups count stages.
class CpAsyncStages {
 public:
  // shared: of all workers, at an address that takes no register.
  CUTE_DEVICE CpAsyncStages(Stages const& stages, uint8_t* shared, int worker)
      : stages_(stages), shared_(shared), worker_(worker) {}

  CUTE_DEVICE uint8_t* operator[](int stage) const {
    return shared_ + (worker_ * stages_.count + stage) * stages_.stage_bytes;
  }

  // This thread's copies into the stage that is read next have arrived.
  CUTE_DEVICE void wait() const {
    static_assert(kMinCpAsyncStages == 2 && kMaxCpAsyncStages == 3, "a group for every fetch that may be in flight");
    if (stages_.count == 2)
      cute::cp_async_wait<0>();
    else
      cute::cp_async_wait<1>();
  }
  // The stage to read, and from now on the one behind it.
  CUTE_DEVICE int advance_read() {
    int stage = read_;
    read_ = read_ + 1 == stages_.count ? 0 : read_ + 1;
    return stage;
  }
  // The stage that was read before `stage`, which is free when all have read it.
  CUTE_DEVICE int before(int stage) const { return stage == 0 ? stages_.count - 1 : stage - 1; }

 private:
  Stages const& stages_;
  uint8_t* shared_;
  int worker_;
  int read_ = 0;
};

}  // namespace cute_kernels::pipeline
