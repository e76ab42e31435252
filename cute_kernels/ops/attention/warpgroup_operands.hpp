// Q and P of a worker that is a warpgroup: the B operands of its WGMMAs, in shared memory.
//
// They are written as any shared memory and read by WGMMA: `publish`, then a barrier of the warps, lie in between.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm75.hpp>

#include "cute_kernels/mma/warpgroup/traits.hpp"
#include "cute_kernels/ops/attention/worker.hpp"

namespace cute_kernels::attention {

// Two buffers of P: a warp may be a tile ahead of the others until their next barrier. Keys and values share one token
// order.
template <class Traits>
class SharedP<Traits, true> {
 public:
  using Element = typename Traits::Element;
  using Keys = mma::WarpgroupTraits<Role::kKey, typename Traits::Stored, Traits::kHeadDim, Traits::kN>;
  using Values = mma::WarpgroupTraits<Role::kValue, typename Traits::Stored, Traits::kHeadDim, Traits::kN>;

  // What was written by this thread is there for WGMMA.
  CUTE_DEVICE static void publish() {
    ptx::compiler_fence();  // the library's fence does not say that it orders memory
    cutlass::arch::fence_view_async_shared();
  }

  // As WGMMA reads it.
  CUTE_DEVICE auto queries() {  // (BLK_N,BLK_K)
    return make_tensor(make_smem_ptr(q_.columns), typename Keys::SmemLayoutB{})(_, _, 0);
  }
  CUTE_DEVICE auto p() { return make_tensor(make_smem_ptr(p_), typename Values::SmemLayoutB{}); }  // (BLK_N,BLK_K,PIPE)

  // This warp's part of P, as B fragments of mma.sync, columns in the order of the compressed values'.
  template <class Fragment>
  CUTE_DEVICE void store(Worker<Traits> const& worker, int buffer, TokenOrders const&,
                         Fragment const& tCrP /* ((2,2),N/8,own token blocks) */) {
    static_assert(Traits::kOwnTokenBlocks == 1);
    Tensor pairs = recast<uint32_t>(tCrP);  // (2,N/8,1)
    int lane = threadIdx.x % 32;
    CUTE_UNROLL
    for (int n = 0; n < Traits::kRowBlocks; ++n) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) unit(buffer, n, lane / 4, 2 * worker.part + j)[lane % 4] = pairs(j, n, 0);
    }
    publish();
  }

  // The first of P's columns, of all warps, as B fragments of mma.sync. After a barrier of the warps.
  template <class Fragment>
  CUTE_DEVICE void load(int buffer, TokenOrders const&, Fragment& tCrP /* ((2,2),N/8,2) */) {
    CUTE_STATIC_ASSERT_V(size<2>(tCrP) == _2{});
    Tensor pairs = recast<uint32_t>(tCrP);  // (2,N/8,2)
    int lane = threadIdx.x % 32;
    CUTE_UNROLL
    for (int n = 0; n < Traits::kRowBlocks; ++n)
      SM75_U32x4_LDSM_N::copy(*reinterpret_cast<uint128_t const*>(unit(buffer, n, lane % 8, lane / 8)), pairs(0, n, 0),
                              pairs(1, n, 0), pairs(0, n, 1), pairs(1, n, 1));
  }

  // A row of the work tile's q, for which there is room of its own, until it is put into the order of columns.
  CUTE_DEVICE Element* query(int row) { return q_.rows[row]; }

  // The bytes of P, for a warp's channels of O^T: the two rows of 8 that this lane accumulates, of a channel.
  CUTE_DEVICE float2& rows_of_channel(int channel) {
    static_assert(sizeof(p_) >= 16 * Traits::kOwnChannelBlocks * 8 * sizeof(float));
    return reinterpret_cast<float2*>(p_)[4 * channel + threadIdx.x % 4];
  }

  // The bytes of P, when it is no longer needed.
  static constexpr int kBytes = cosize_v<typename Values::SmemLayoutB> * sizeof(Element);
  CUTE_DEVICE void* bytes() { return p_; }

  // A number of every warp for every row: of those that this lane accumulates.
  CUTE_DEVICE float& row_number(int warp, int i) {
    return row_numbers_[warp][i / 2 * 8 + 2 * (threadIdx.x % 4) + i % 2];
  }

 private:
  union Queries {
    Element rows[Traits::kN][Traits::kQueryStride];
    Element columns[cosize_v<typename Keys::SmemLayoutB>];
    CUTE_DEVICE Queries() {}
  };
  alignas(1024) Element p_[cosize_v<typename Values::SmemLayoutB>];
  alignas(1024) Queries q_;
  float row_numbers_[Traits::kWorkerWarps][Traits::kN];

  // 8 columns of a row of P: rows of 128 bytes, whose units of 16 are swizzled by the row.
  CUTE_DEVICE uint32_t* unit(int buffer, int n, int row, int unit) {
    constexpr int kRowWords = Traits::kTokens / 2;
    static_assert(kRowWords == 32);
    return reinterpret_cast<uint32_t*>(p_) + (buffer * Traits::kN + 8 * n + row) * kRowWords + (unit ^ row) * 4;
  }
};

}  // namespace cute_kernels::attention
