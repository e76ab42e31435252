// A window tile: dense tokens into A fragments, from the stages that producers have filled or the worker fills itself.
//
// Every warp of a worker takes 16 tokens of the keys, the first block of its part of a tile's 64; the positions of the
// other blocks are masked. Of the values it takes its part of the channels, in the order in which they lie; O^T gets
// the order of the compressed values afterwards, once for all window tiles.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/ops/attention/stage.hpp"
#include "cute_kernels/ops/attention/worker.hpp"

namespace cute_kernels::attention {

// D += A B of 16-bit operands. Of a codec with scales the kernel has them as bits and learns their dtype when it runs: this
// is then all of a window tile's code that there is twice.
template <class Element>
class WindowMma {
 public:
  CUTE_DEVICE explicit WindowMma(DType dtype) : dtype_(dtype) {}

  template <class FragmentA, class FragmentB, class FragmentC>
  CUTE_DEVICE void operator()(FragmentA const& tCrA, FragmentB const& tCrB, FragmentC&& tCrC) const {
    if constexpr (!std::is_same_v<Element, uint16_t>)
      multiply<Element>(tCrA, tCrB, tCrC);
    else if (dtype_ == DType::kFloat16)
      multiply<half_t>(tCrA, tCrB, tCrC);
    else
      multiply<bfloat16_t>(tCrA, tCrB, tCrC);
  }

 private:
  DType dtype_;

  template <class As, class FragmentA, class FragmentB, class FragmentC>
  CUTE_DEVICE static void multiply(FragmentA const& tCrA, FragmentB const& tCrB, FragmentC& tCrC) {
    cute::gemm(MMA_Atom<mma::WarpMmaOp<As>>{}, recast<As>(tCrA), recast<As>(tCrB), tCrC);
  }
};

template <class Traits>
class WindowTile {
 public:
  using Element = typename Traits::Element;  // of the window and of queries: maybe only bits
  static constexpr int kTokenBlocks = schedule::kWindowTileTokens / 16;  // the first warps take one each
  static_assert(kTokenBlocks <= Traits::kWorkerWarps);

  // The `index`-th tile of a work tile's window.
  CUTE_DEVICE WindowTile(Params const& params, schedule::WorkTile const& work_tile, int index,
                         Worker<Traits> const& worker)
      : params_(params),
        work_tile_(work_tile),
        worker_(worker),
        part_(worker.part),
        stride_(window_row_elements(params.keys.head_dim)),
        first_token_(index * schedule::kWindowTileTokens),
        tokens_(work_tile.window_tokens - first_token_) {}

  // At a position of the tile, counted from the window's first.
  CUTE_DEVICE int token(int position) const {
    constexpr int kPart = 16 * Traits::kOwnTokenBlocks, kMasked = INT32_MAX;
    bool exists = position % kPart < 16 && (kTokenBlocks == Traits::kWorkerWarps || position < kTokenBlocks * kPart);
    return exists ? first_token_ + position / kPart * 16 + position % kPart : kMasked;
  }

  // Unless producers have: fills the stage of the keys or of the values, with all warps of the worker.
  CUTE_DEVICE void fill(Stage const& stage, void const* window, int64_t const (&strides)[3]) const {
    if (params_.window_staged) return;
    auto const* from = static_cast<Element const*>(window) + window_offset(work_tile_, strides, first_token_);
    auto* to = reinterpret_cast<Element*>(stage.block);
    int vectors = stride_ / 8, end = vectors * min(tokens_, schedule::kWindowTileTokens);
    CUTE_NO_UNROLL
    for (int i = threadIdx.x % Traits::kWorkerThreads; i < end; i += Traits::kWorkerThreads) {
      int channel = i % vectors * 8;
      auto const* vector = from + i / vectors * strides[2] + channel;
      if (params_.window_vectorized) {
        reinterpret_cast<uint4*>(to)[i] = *reinterpret_cast<uint4 const*>(vector);
        continue;
      }
      CUTE_NO_UNROLL
      for (int j = 0; j < 8; ++j) to[8 * i + j] = channel + j < params_.keys.head_dim ? vector[j] : Element(0);
    }
    worker_.sync();
  }

  // S^T = K Q^T. `stage`: that of the tile's keys.
  template <class FragmentS>
  CUTE_DEVICE void multiply_keys(Stage const& stage, SharedP<Traits>& shared_p,
                                 FragmentS& tCrS /* (MMA,own MMA_M,MMA_N) */) const {
    auto const* keys = reinterpret_cast<Element const*>(stage.block);
    int row = 16 * part_ + lane_ / 4;
    WindowMma<Element> multiply(params_.keys.dtype);
    clear(tCrS);
    // A lane takes 8 neighbouring channels of every 32, of keys and of queries alike: the order of terms is free.
    CUTE_NO_UNROLL
    for (int channel = 8 * (lane_ % 4); channel < Traits::kHeadDim; channel += 32) {
      uint4 a[2];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        a[i] = make_uint4(0, 0, 0, 0);
        if ((kTokenBlocks == Traits::kWorkerWarps || part_ < kTokenBlocks) && row + 8 * i < tokens_ &&
            channel < stride_)
          a[i] = *reinterpret_cast<uint4 const*>(keys + (row + 8 * i) * stride_ + channel);
      }
      Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _2>{});  // (MMA,blocks of 16 channels)
      Tensor words = recast<uint32_t>(tCrA);
      words(0, 0) = a[0].x, words(1, 0) = a[1].x, words(2, 0) = a[0].y, words(3, 0) = a[1].y;
      words(0, 1) = a[0].z, words(1, 1) = a[1].z, words(2, 1) = a[0].w, words(3, 1) = a[1].w;
      CUTE_UNROLL
      for (int n = 0; n < Traits::kRowBlocks; ++n) {
        Tensor tCrB = make_tensor<Element>(Shape<Shape<_2, _2>, _2>{});  // (MMA,blocks of 16 channels)
        *reinterpret_cast<uint4*>(raw_pointer_cast(tCrB.data())) =
            *reinterpret_cast<uint4 const*>(shared_p.query(8 * n + lane_ / 4) + channel);
        multiply(tCrA(_, 0), tCrB(_, 0), tCrS(_, 0, n));
        multiply(tCrA(_, 1), tCrB(_, 1), tCrS(_, 0, n));
      }
    }
  }

  // O^T += V^T P^T. `stage`: that of the tile's values.
  template <class FragmentP, class FragmentO>
  CUTE_DEVICE void multiply_values(Stage const& stage, FragmentP const& tCrP /* (MMA,MMA_N,MMA_K) */,
                                   FragmentO& tCrO /* (MMA,own MMA_M,MMA_N) */) const {
    auto const* values = reinterpret_cast<Element const*>(stage.block);
    WindowMma<Element> multiply(params_.keys.dtype);
    CUTE_UNROLL
    for (int m = 0; m < Traits::kOwnChannelBlocks; m += kBlocks) {
      CUTE_UNROLL
      for (int k = 0; k < kTokenBlocks; ++k) {
        ptx::compiler_fence();  // or more loads come first than registers suffice for
        Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, Int<kBlocks>>{});  // (MMA,MMA_M)
        Tensor words = recast<uint32_t>(tCrA);                                         // pairs of tokens
        CUTE_UNROLL
        for (int pair = 0; pair < 2; ++pair) {
          int token = Traits::TileFormat::position_of_column(16 * k + 8 * pair);
          uint32_t pairs[kMatrices];
          load_pairs(values, token, 16 * (part_ * Traits::kOwnChannelBlocks + m), pairs);
          CUTE_UNROLL
          for (int i = 0; i < kMatrices; ++i) words(i % 2 + 2 * pair, i / 2) = pairs[i];
        }
        CUTE_UNROLL
        for (int i = 0; i < cute::min(kBlocks, Traits::kOwnChannelBlocks); ++i) {
          CUTE_UNROLL
          for (int n = 0; n < Traits::kRowBlocks; ++n)
            multiply(tCrA(_, i), tCrP(_, n, k * Traits::kOwnTokenBlocks), tCrO(_, m + i, n));
        }
      }
    }
  }

 private:
  static constexpr int kBlocks =
      2;  // of 16 channels, that are loaded at a time: as matrices of 8 channels and 8 tokens
  static constexpr int kMatrices = 2 * kBlocks;

  Params const& params_;
  schedule::WorkTile const& work_tile_;
  Worker<Traits> const& worker_;
  int lane_ = ptx::lane_index();
  int part_, stride_;  // elements from token to token in a stage
  int first_token_;
  int tokens_;  // from the first on

  // Of channels first_channel + lane / 4, + 8, + 16, + 24: the tokens of the lane's two columns from a block's on.
  // Tokens lie as far apart as banks repeat, so those of a matrix begin with different channels.
  CUTE_DEVICE void load_pairs(Element const* values, int block, int first_channel, uint32_t (&pairs)[kMatrices]) const {
    static_assert(kMatrices == 4);
    constexpr int kPairDistance = Traits::TileFormat::position_of_column(1);  // between tokens of a register
    int row = lane_ % 8, token = block + row - row % 2 + row % 2 * kPairDistance;
    int channel = first_channel + 8 * ((lane_ / 8 + row / 2) % kMatrices);
    // Channels beyond the last, whose results are not stored, repeat others.
    auto const* from = values + min(token, max(tokens_ - 1, 0)) * stride_ + min(channel, stride_ - 8);
    SM75_U16x8_LDSM_T::copy(*reinterpret_cast<uint128_t const*>(from), pairs[0], pairs[1], pairs[2], pairs[3]);
    CUTE_UNROLL
    for (int bit = 1; bit < kMatrices; bit *= 2) {  // undoes the rotation
      uint32_t before[kMatrices];
      CUTE_UNROLL
      for (int i = 0; i < kMatrices; ++i) before[i] = pairs[i];
      CUTE_UNROLL
      for (int i = 0; i < kMatrices; ++i)
        if (lane_ % 4 & bit) pairs[i] = before[(i + kMatrices - bit) % kMatrices];
    }
    // Whatever lies where there is no token must not be multiplied by a weight of 0: zeros take its place.
    int low = block + 2 * (lane_ % 4), high = low + kPairDistance;
    uint32_t exists = (low < tokens_ ? 0xffffu : 0) | (high < tokens_ ? 0xffff0000u : 0);
    CUTE_UNROLL
    for (int i = 0; i < kMatrices; ++i) pairs[i] &= exists;
  }
};

// O^T of window tiles, whose channels are in the order in which they lie, in the order of the compressed values: the
// worker's warps pass each other their rows through shared memory.
template <class Traits, class FragmentO>
CUTE_DEVICE void order_channels(Worker<Traits> const& worker, SharedP<Traits>& shared_p, uint8_t const* channel_order,
                                FragmentO& tCrO /* ((2,2),own MMA_M,MMA_N) */) {
  constexpr int kBlocks = Traits::kOwnChannelBlocks, kPart = 16 * kBlocks;  // channels of a warp
  int lane = threadIdx.x % 32;
  uint8_t const* of_lane = channel_order + worker.part * kPart + lane / 4;
  CUTE_UNROLL
  for (int n = 0; n < Traits::kRowBlocks; ++n) {
    Tensor ordered = make_tensor_like(tCrO(_, _, n));  // ((2,2),own MMA_M)
    CUTE_NO_UNROLL
    for (int part = 0; part < Traits::kWorkerWarps; ++part) {
      worker.sync();  // what was there has been read
      if (worker.part == part) {
        CUTE_UNROLL
        for (int i = 0; i < 2 * kBlocks; ++i)
          shared_p.rows_of_channel(8 * i + lane / 4) =
              make_float2(tCrO(make_coord(0, i % 2), i / 2, n), tCrO(make_coord(1, i % 2), i / 2, n));
      }
      worker.sync();
      CUTE_UNROLL
      for (int i = 0; i < 2 * kBlocks; ++i) {
        int channel = of_lane[8 * i] - part * kPart;
        if (channel < 0 || channel >= kPart) continue;
        float2 rows = shared_p.rows_of_channel(channel);
        ordered(make_coord(0, i % 2), i / 2) = rows.x, ordered(make_coord(1, i % 2), i / 2) = rows.y;
      }
    }
    copy(ordered, tCrO(_, _, n));
  }
}

}  // namespace cute_kernels::attention
