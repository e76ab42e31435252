// sparse_qk by warps: S^T = K Q^T, a tile of keys to a warp at a time.
#pragma once

#include "cute_kernels/mma/scales.hpp"
#include "cute_kernels/mma/warp/multiply_tile.hpp"
#include "cute_kernels/ops/product/stage.hpp"
#include "cute_kernels/ops/qk/store_logits.hpp"

namespace cute_kernels::qk {

using namespace cute;

// Q^T as B fragments, channels in the order of the head's compressed channels. Channels beyond the last are
// zeros; rows beyond the last repeat it, are computed and never stored.
template <class Traits, class Fragment>
CUTE_DEVICE void load_queries(Params const& params, schedule::WorkTile const& work_tile,
                              Fragment& tCrB /* (MMA,MMA_N,MMA_K) */) {
  using Element = typename Traits::Element;
  auto thr_mma = typename Traits::TiledMma{}.get_slice(threadIdx.x % 32);
  Tensor cB =
      make_identity_tensor(Shape<Int<Traits::kN>, Int<Traits::kK>>{});  // (BLK_N,BLK_K) -> (row, channel_position)
  Tensor tCcB = thr_mma.partition_B(cB);                                // ((2,2),MMA_N,MMA_K)
  CUTE_STATIC_ASSERT_V(shape(tCcB) == shape(tCrB));
  CUTE_STATIC_ASSERT_V((shape<0>(tCcB) == Shape<_2, _2>{}));  // two neighbouring columns, then 8 further on
  uint8_t const* channel_order = params.channel_order(work_tile);
  CUTE_UNROLL
  for (int n = 0; n < size<1>(tCcB); ++n) {
    int row = min(get<0>(tCcB(0, n, 0)), work_tile.rows - 1);
    auto const* q = static_cast<Element const*>(params.dense.data) + params.head_offset(work_tile) +
                    params.row_offset(work_tile.first_row + row);
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tCcB); ++k) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        int position = 16 * k + 8 * j + 2 * (threadIdx.x % 4);
        uint32_t channels = __ldg(reinterpret_cast<uint16_t const*>(channel_order + position));
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          int channel = channels >> (8 * i) & 0xff;
          tCrB(Traits::TileFormat::fragment_entry(j, i), n, k) =
              channel < params.sparse.head_dim ? q[channel] : Element(0.f);
        }
      }
    }
  }
}

// The same times the scales of the channels, see mma/scales.hpp.
template <class Traits, class Fragment, int kRows>
CUTE_DEVICE void load_scaled_queries(Params const& params, schedule::WorkTile const& work_tile,
                                     Fragment& tCrB /* ((2,2),MMA_N,MMA_K) */, float (&undo)[kRows]) {
  uint8_t const* channel_order = params.channel_order(work_tile);
  uint16_t const* channel_scale = params.channel_scale(work_tile);
  auto product = [&](int lane, int n, int v, int k) {
    int row = min(8 * n + lane / 4, work_tile.rows - 1);
    auto const* q = static_cast<uint16_t const*>(params.dense.data) + params.head_offset(work_tile) +
                    params.row_offset(work_tile.first_row + row);
    // Two neighbouring positions are loaded together: the other one's product takes the same words.
    int position = 16 * k + 8 * Traits::TileFormat::eight_of(v) + 2 * (lane % 4), next = Traits::TileFormat::next_of(v);
    int channel = __ldg(reinterpret_cast<uint16_t const*>(channel_order + position)) >> (8 * next) & 0xff;
    float2 scales = mma::scale_pair(__ldg(reinterpret_cast<uint32_t const*>(channel_scale + position)));
    if (channel >= params.sparse.head_dim) return 0.f;
    return from_half_bits(q[channel], params.sparse.dtype) * (next ? scales.y : scales.x);
  };
  mma::load_scaled_rows(tCrB, product, undo);
}

// Logits of numbers of codes times the scales of tokens and what rows were divided by. block: of the tile, which has not
// been written over.
template <class Traits, class Fragment, int kRows>
CUTE_DEVICE void scale_logits(uint8_t const* block, float const (&undo)[kRows],
                              Fragment& tCrC /* ((2,2),MMA_M,MMA_N) */) {
  constexpr int kBefore = Traits::TileFormat::scale_row(Traits::kHeadDim) * format::kRowBytes;
  mma::LaneScales<Traits::kM / 16> scales(block + kBefore, 0);
  CUTE_UNROLL
  for (int n = 0; n < size<2>(tCrC); ++n) {
    CUTE_UNROLL
    for (int m = 0; m < size<1>(tCrC); ++m) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        tCrC(make_coord(0, j), m, n) *= scales.of[m][j] * undo[2 * n];
        tCrC(make_coord(1, j), m, n) *= scales.of[m][j] * undo[2 * n + 1];
      }
    }
  }
}

// All tiles of a warp's split, as `pipeline` loads them.
template <class Traits, class Schedule, class Pipeline>
CUTE_DEVICE void multiply_keys(Params const& params, Schedule const& schedule, schedule::Range split,
                               Pipeline& pipeline) {
  using TiledMma = typename Traits::TiledMma;
  auto thr_mma = TiledMma{}.get_slice(threadIdx.x % 32);
  Tensor cB = make_identity_tensor(Shape<Int<Traits::kN>, Int<Traits::kK>>{});
  Tensor tCrB = make_tensor<typename Traits::Element>(shape(thr_mma.partition_B(cB)));  // (MMA,MMA_N,MMA_K)
  for (int tile = split.begin; tile < split.end;) {
    schedule::WorkTile work_tile = schedule.work_tile_with(tile);
    [[maybe_unused]] float undo[Traits::kN / 4];  // of the rows
    if constexpr (Traits::kHasScales)
      load_scaled_queries<Traits>(params, work_tile, tCrB, undo);
    else
      load_queries<Traits>(params, work_tile, tCrB);
    CUTE_NO_UNROLL
    for (int end = min(work_tile.tiles.end, split.end); tile < end; ++tile) {
      product::Stage stage = pipeline.next(work_tile, tile);
      Tensor tCrC = partition_fragment_C(TiledMma{}, Shape<Int<Traits::kM>, Int<Traits::kN>>{});  // (MMA,MMA_M,MMA_N)
      clear(tCrC);
      mma::multiply_tile<Traits>(cast_smem_ptr_to_uint(stage.block), tCrB, tCrC);
      if constexpr (Traits::kHasScales) scale_logits<Traits>(stage.block, undo, tCrC);
      __syncwarp();  // the block has been read: its bytes now take the logits
      store_logits<Traits>(params, work_tile, tile, stage, tCrC);
      pipeline.release();
    }
  }
}

}  // namespace cute_kernels::qk
