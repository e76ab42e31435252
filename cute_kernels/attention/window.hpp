// A unit of the window: dense tokens, straight from global memory into A fragments. A segment has few of them.
#pragma once

#include "cute_kernels/attention/queries.hpp"
#include "cute_kernels/common/ptx.hpp"

namespace cute_kernels::attention {

template <class Traits>
class WindowUnit {
 public:
  // The `index`-th unit of a segment's window, of which the warp takes its part.
  CUTE_DEVICE WindowUnit(Params const& params, Segment const& segment, int index, int part)
      : part_(part),
        head_dim_(params.keys.head_dim),
        first_token_(index * kUnitTokens),
        tokens_(segment.window_tokens),
        key_stride_(static_cast<int>(params.window.key_strides[2])),
        value_stride_(static_cast<int>(params.window.value_strides[2])) {
    Window const& window = params.window;
    keys_ = static_cast<Element const*>(window.keys) + segment.sequence * window.key_strides[0] +
            segment.kv_head * window.key_strides[1];
    values_ = static_cast<Element const*>(window.values) + segment.sequence * window.value_strides[0] +
              segment.kv_head * window.value_strides[1];
  }

  // Counted from the window's first.
  CUTE_DEVICE int token(int position) const { return first_token_ + position; }

  // S^T = K Q^T
  template <class FragmentS>
  CUTE_DEVICE void multiply_keys(Queries<Traits> const& queries, FragmentS& tCrS /* (MMA,own MMA_M,MMA_N) */) const {
    int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
    MMA_Atom<matmul::MmaOp<Element>> mma;
    clear(tCrS);
    CUTE_NO_UNROLL
    for (int k = 0; k < Traits::kHeadDim / 16; ++k) {
      Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, Int<kOwnBlocks>>{});      // (MMA,own MMA_M)
      Tensor tCrB = make_tensor<Element>(Shape<Shape<_2, _2>, Int<Traits::kRowBlocks>>{});  // (MMA,MMA_N)
      CUTE_UNROLL
      for (int m = 0; m < kOwnBlocks; ++m) {
        CUTE_UNROLL
        for (int v = 0; v < 8; ++v)  // column + v % 2 (+ 8), row (+ 8): as the atom's A has them
          tCrA(v, m) = at(keys_, key_stride_, 16 * (part_ * kOwnBlocks + m) + row + 8 * (v / 2 % 2),
                          16 * k + column + v % 2 + 8 * (v / 4));
      }
      queries.load_in_order(k, tCrB);
      CUTE_UNROLL
      for (int m = 0; m < kOwnBlocks; ++m) {
        CUTE_UNROLL
        for (int n = 0; n < Traits::kRowBlocks; ++n) cute::gemm(mma, tCrA(_, m), tCrB(_, n), tCrS(_, m, n));
      }
    }
  }

  // O^T += V^T P^T, channels in the order of the compressed values.
  template <class FragmentP, class FragmentO>
  CUTE_DEVICE void multiply_values(uint8_t const* channel_order, FragmentP const& tCrP /* (MMA,MMA_N,MMA_K) */,
                                   FragmentO& tCrO /* (MMA,own MMA_M,MMA_N) */) const {
    int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
    MMA_Atom<matmul::MmaOp<Element>> mma;
    uint8_t const* channels = channel_order + 16 * part_ * Traits::kOwnChannelBlocks + row;
    CUTE_UNROLL
    for (int k = 0; k < kBlocks; ++k) {
      CUTE_UNROLL
      for (int m = 0; m < Traits::kOwnChannelBlocks; ++m) {
        if (m % 2 == 0) ptx::compiler_fence();  // or more loads come first than registers suffice for
        int channel[2] = {channels[16 * m], channels[16 * m + 8]};
        Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>>{});  // (MMA)
        CUTE_UNROLL
        for (int v = 0; v < 8; ++v)
          tCrA(v) = at(values_, value_stride_, 16 * k + column + v % 2 + 8 * (v / 4), channel[v / 2 % 2]);
        CUTE_UNROLL
        for (int n = 0; n < Traits::kRowBlocks; ++n) cute::gemm(mma, tCrA, tCrP(_, n, k), tCrO(_, m, n));
      }
    }
  }

 private:
  using Element = typename Traits::Element;
  static constexpr int kBlocks = Traits::kTokenBlocks, kOwnBlocks = Traits::kOwnTokenBlocks;
  Element const *keys_, *values_;
  int part_, head_dim_, first_token_, tokens_;
  int key_stride_, value_stride_;  // times the tokens of a window within 2^31, which dispatch/ sees to

  // Zeros where there is no such token or channel: whatever lies there must not meet a weight of 0.
  CUTE_DEVICE Element at(Element const* data, int stride, int position, int channel) const {
    return token(position) < tokens_ && channel < head_dim_ ? data[token(position) * stride + channel] : Element(0.f);
  }
};

}  // namespace cute_kernels::attention
