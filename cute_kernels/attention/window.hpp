// A unit of the window: dense tokens, straight from global memory into A fragments. A segment has few of them, so their
// loads are not under way ahead of time; they come in few rounds instead.
//
// Every warp of a worker takes 16 tokens, the first block of its part of a tile's 64; the positions of the other blocks
// are not seen.
#pragma once

#include "cute_kernels/attention/queries.hpp"
#include "cute_kernels/common/ptx.hpp"

namespace cute_kernels::attention {

template <class Traits>
class WindowUnit {
 public:
  static_assert(kWindowUnitTokens == 16 * Traits::kWorkerWarps);
  static constexpr int kUnseen = INT32_MAX;

  // The `index`-th unit of a segment's window, of which the warp takes its part.
  CUTE_DEVICE WindowUnit(Params const& params, Segment const& segment, int index, int part)
      : part_(part),
        head_dim_(params.keys.head_dim),
        first_token_(index * kWindowUnitTokens),
        tokens_(segment.window_tokens),
        key_stride_(static_cast<int>(params.window.key_strides[2])),
        value_stride_(static_cast<int>(params.window.value_strides[2])) {
    Window const& window = params.window;
    keys_ = static_cast<Element const*>(window.keys) + segment.sequence * window.key_strides[0] +
            segment.kv_head * window.key_strides[1];
    values_ = static_cast<Element const*>(window.values) + segment.sequence * window.value_strides[0] +
              segment.kv_head * window.value_strides[1];
  }

  // At a position of the tile, counted from the window's first.
  CUTE_DEVICE int token(int position) const {
    constexpr int kPart = 16 * Traits::kOwnTokenBlocks;
    return position % kPart < 16 ? first_token_ + position / kPart * 16 + position % kPart : kUnseen;
  }

  // S^T = K Q^T
  template <class FragmentS>
  CUTE_DEVICE void multiply_keys(Queries<Traits> const& queries, FragmentS& tCrS /* (MMA,own MMA_M,MMA_N) */) const {
    constexpr int kRoundBlocks = 2 * kRound;
    int row = 16 * part_ + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
    MMA_Atom<matmul::MmaOp<Element>> mma;
    clear(tCrS);
    CUTE_NO_UNROLL
    for (int round = 0; round < Traits::kHeadDim / 16; round += kRoundBlocks) {
      Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, Int<kRoundBlocks>>{});  // (MMA,blocks)
      Tensor tCrB = make_tensor<Element>(
          Shape<Shape<_2, _2>, Int<Traits::kRowBlocks>, Int<kRoundBlocks>>{});  // (MMA,MMA_N,blocks)
      CUTE_UNROLL
      for (int k = 0; k < kRoundBlocks; ++k) {
        CUTE_UNROLL
        for (int v = 0; v < 8; ++v)  // column + v % 2 (+ 8), row (+ 8): as the atom's A has them
          tCrA(v, k) = at(keys_, key_stride_, row + 8 * (v / 2 % 2), 16 * (round + k) + column + v % 2 + 8 * (v / 4));
        queries.load_in_order(round + k, tCrB(_, _, k));
      }
      CUTE_UNROLL
      for (int k = 0; k < kRoundBlocks; ++k) {
        CUTE_UNROLL
        for (int n = 0; n < Traits::kRowBlocks; ++n) cute::gemm(mma, tCrA(_, k), tCrB(_, n, k), tCrS(_, 0, n));
      }
    }
  }

  // O^T += V^T P^T, channels in the order of the compressed values.
  template <class FragmentP, class FragmentO>
  CUTE_DEVICE void multiply_values(uint8_t const* channel_order, FragmentP const& tCrP /* (MMA,MMA_N,MMA_K) */,
                                   FragmentO& tCrO /* (MMA,own MMA_M,MMA_N) */) const {
    constexpr int kRoundBlocks = kRound;
    int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
    MMA_Atom<matmul::MmaOp<Element>> mma;
    uint8_t const* channels = channel_order + 16 * part_ * Traits::kOwnChannelBlocks + row;
    CUTE_UNROLL
    for (int round = 0; round < Traits::kOwnChannelBlocks; round += kRoundBlocks) {
      ptx::compiler_fence();  // or more loads come first than registers suffice for
      Tensor tCrA = make_tensor<Element>(
          Shape<Shape<_2, _2, _2>, Int<kRoundBlocks>, Int<Traits::kWorkerWarps>>{});  // (MMA,MMA_M,token blocks)
      CUTE_UNROLL
      for (int m = 0; m < kRoundBlocks; ++m) {
        int channel[2] = {channels[16 * (round + m)], channels[16 * (round + m) + 8]};
        CUTE_UNROLL
        for (int k = 0; k < Traits::kWorkerWarps; ++k) {
          CUTE_UNROLL
          for (int v = 0; v < 8; ++v)
            tCrA(v, m, k) = at(values_, value_stride_, 16 * k + column + v % 2 + 8 * (v / 4), channel[v / 2 % 2]);
        }
      }
      CUTE_UNROLL
      for (int m = 0; m < kRoundBlocks; ++m) {
        CUTE_UNROLL
        for (int k = 0; k < Traits::kWorkerWarps; ++k) {
          CUTE_UNROLL
          for (int n = 0; n < Traits::kRowBlocks; ++n)
            cute::gemm(mma, tCrA(_, m, k), tCrP(_, n, k * Traits::kOwnTokenBlocks), tCrO(_, round + m, n));
        }
      }
    }
  }

 private:
  using Element = typename Traits::Element;
  static constexpr int kRound =
      Traits::kHeadDim < format::kMaxHeadDim ? 2 : 1;  // by registers: 32 tokens by 16 channels
  Element const *keys_, *values_;
  int part_, head_dim_, first_token_, tokens_;
  int key_stride_, value_stride_;  // times the tokens of a window within 2^31, which dispatch/ sees to

  // Zeros where there is no such token or channel: whatever lies there must not meet a weight of 0.
  CUTE_DEVICE Element at(Element const* data, int stride, int index, int channel) const {
    int token = first_token_ + index;
    return token < tokens_ && channel < head_dim_ ? data[token * stride + channel] : Element(0.f);
  }
};

}  // namespace cute_kernels::attention
