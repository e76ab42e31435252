// Q^T as B fragments. Rows beyond a work tile's last repeat it, are computed and never stored.
#pragma once

#include "cute_kernels/ops/attention/params.hpp"
#include "cute_kernels/ops/attention/worker.hpp"

namespace cute_kernels::attention {

template <class Traits>
class Queries {
 public:
  using Element = typename Traits::Element;

  CUTE_DEVICE Queries(Params const& params, schedule::WorkTile const& work_tile) : head_dim_(params.keys.head_dim) {
    auto thr_mma = typename Traits::Keys::TiledMma{}.get_slice(threadIdx.x % 32);
    Tensor tCcB = thr_mma.partition_B(cB());  // ((2,2),MMA_N,MMA_K) -> (row, channel_position)
    CUTE_UNROLL
    for (int n = 0; n < kBlocks; ++n) {
      int row = work_tile.first_row + min(get<0>(tCcB(0, n, 0)), work_tile.rows - 1), head, token;
      params.query_tokens(head, token, row);
      rows_[n] = static_cast<Element const*>(params.q) + work_tile.row * params.q_strides[0] +
                 (int64_t{work_tile.kv_head} * params.group + head) * params.q_strides[1] + token * params.q_strides[2];
    }
  }

  // Channels in the order of the compressed keys; those beyond the last are zeros. With all warps of a worker,
  // through shared memory: rows and order are loaded at the same time, and a quad loads neighbours.
  template <class Fragment>
  CUTE_DEVICE void load(Worker<Traits> const& worker, SharedP<Traits>& shared_p, uint8_t const* channel_order,
                        Fragment& tCrB /* ((2,2),MMA_N,MMA_K) */) const {
    CUTE_STATIC_ASSERT_V((shape<0>(tCrB) == Shape<_2, _2>{}));  // two neighbouring columns, then 8 further on
    constexpr int kSteps = Traits::kHeadDim / (4 * Traits::kWorkerWarps);  // of a quad, which has a row of each block
    int row = threadIdx.x % 32 / 4, first_channel = 4 * kSteps * worker.part + threadIdx.x % 4;  // then every fourth
    Element values[kSteps][kBlocks];
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      CUTE_UNROLL
      for (int n = 0; n < kBlocks; ++n) {
        int channel = first_channel + 4 * i;
        values[i][n] = channel < head_dim_ ? rows_[n][channel] : Element(0.f);
      }
    }
    uint32_t channels[Traits::kHeadDim / 16][2];
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrB); ++k) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        int position =
            Traits::TileFormat::position_of_column(16 * k + j) + 2 * (threadIdx.x % 4);  // that of column + 8 is next
        channels[k][j] = __ldg(reinterpret_cast<uint16_t const*>(channel_order + position));
      }
    }
    Element* shared = shared_p.q();
    worker.sync();  // the P that was there has been read
    CUTE_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      CUTE_UNROLL
      for (int n = 0; n < kBlocks; ++n)
        shared[(8 * n + row) * Traits::kQueryStride + first_channel + 4 * i] = values[i][n];
    }
    worker.sync();
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCrB); ++k) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        CUTE_UNROLL
        for (int n = 0; n < kBlocks; ++n) {
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i)
            tCrB(make_coord(j, i), n, k) =
                shared[(8 * n + row) * Traits::kQueryStride + (channels[k][j] >> (8 * i) & 0xff)];
        }
      }
    }
    worker.sync();
  }

  // Of lane / 4 in block n.
  CUTE_DEVICE Element const* row(int n) const { return rows_[n]; }

 private:
  static constexpr int kBlocks = Traits::kN / 8;
  Element const* rows_[kBlocks];  // of lane / 4 in every block of 8
  int head_dim_;

  CUTE_DEVICE static auto cB() { return make_identity_tensor(Shape<Int<Traits::kN>, Int<Traits::kHeadDim>>{}); }
};

}  // namespace cute_kernels::attention
