// A window tile: dense tokens into A fragments, from the stage that producers have filled or straight from global
// memory.
//
// Every warp of a worker takes 16 tokens, the first block of its part of a tile's 64; the positions of the other blocks
// are masked.
#pragma once

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/ops/attention/load_queries.hpp"
#include "cute_kernels/ops/attention/stage.hpp"

namespace cute_kernels::attention {

template <class Traits>
class WindowTile {
 public:
  static_assert(schedule::kWindowTileTokens == 16 * Traits::kWorkerWarps);

  // The `index`-th tile of a work tile's window, of which the warp takes its part.
  CUTE_DEVICE WindowTile(Params const& params, schedule::WorkTile const& work_tile, int index, int part)
      : params_(params),
        work_tile_(work_tile),
        part_(part),
        first_token_(index * schedule::kWindowTileTokens),
        tokens_(work_tile.window_tokens - first_token_) {}

  // At a position of the tile, counted from the window's first.
  CUTE_DEVICE int token(int position) const {
    constexpr int kPart = 16 * Traits::kOwnTokenBlocks, kMasked = INT32_MAX;
    return position % kPart < 16 ? first_token_ + position / kPart * 16 + position % kPart : kMasked;
  }

  // S^T = K Q^T. `stage`: that of the tile's keys.
  template <class FragmentS>
  CUTE_DEVICE void multiply_keys(Stage const& stage, FragmentS& tCrS /* (MMA,own MMA_M,MMA_N) */) const {
    Window const& window = params_.window;
    Rows keys = rows(stage, window.keys, window.key_strides);
    Queries<Traits> queries(params_, work_tile_);
    int row = 16 * part_ + lane_ / 4;
    MMA_Atom<mma::WarpMmaOp<Element>> mma;
    clear(tCrS);
    // A lane takes 8 neighbouring channels of every 32, of keys and of queries alike: the order of terms is free.
    CUTE_NO_UNROLL
    for (int channel = 8 * (lane_ % 4); channel < Traits::kHeadDim; channel += 32) {
      uint4 a[2];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i)
        a[i] =
            row + 8 * i < tokens_ ? vector(keys.data + (row + 8 * i) * keys.stride, channel) : make_uint4(0, 0, 0, 0);
      Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _2>{});  // (MMA,blocks of 16 channels)
      Tensor words = recast<uint32_t>(tCrA);
      words(0, 0) = a[0].x, words(1, 0) = a[1].x, words(2, 0) = a[0].y, words(3, 0) = a[1].y;
      words(0, 1) = a[0].z, words(1, 1) = a[1].z, words(2, 1) = a[0].w, words(3, 1) = a[1].w;
      CUTE_UNROLL
      for (int n = 0; n < Traits::kRowBlocks; ++n) {
        Tensor tCrB = make_tensor<Element>(Shape<Shape<_2, _2>, _2>{});  // (MMA,blocks of 16 channels)
        *reinterpret_cast<uint4*>(raw_pointer_cast(tCrB.data())) = vector(queries.row(n), channel);
        cute::gemm(mma, tCrA(_, 0), tCrB(_, 0), tCrS(_, 0, n));
        cute::gemm(mma, tCrA(_, 1), tCrB(_, 1), tCrS(_, 0, n));
      }
    }
  }

  // O^T += V^T P^T, channels in the order of the compressed values. `stage`: that of the tile's values.
  template <class FragmentP, class FragmentO>
  CUTE_DEVICE void multiply_values(Stage const& stage, uint8_t const* channel_order,
                                   FragmentP const& tCrP /* (MMA,MMA_N,MMA_K) */,
                                   FragmentO& tCrO /* (MMA,own MMA_M,MMA_N) */) const {
    Window const& window = params_.window;
    Rows values = rows(stage, window.values, window.value_strides);
    int row = lane_ / 4, column = 2 * (lane_ % 4), last_token = max(tokens_ - 1, 0),
        last_channel = params_.values.head_dim - 1;
    MMA_Atom<mma::WarpMmaOp<Element>> mma;
    uint8_t const* channels = channel_order + 16 * part_ * Traits::kOwnChannelBlocks + row;
    // Tokens lie as far apart as banks repeat: the lanes of a quad, which have a token each, begin with different
    // channels. Kernels for separate orders are too long for it: their code would exceed what a launch
    // fetches ahead.
    int rotation = Traits::kSeparateOrders ? 0 : lane_ % kChannels;
    CUTE_UNROLL
    for (int round = 0; round < Traits::kOwnChannelBlocks; round += kRound) {
      ptx::compiler_fence();  // or more loads come first than registers suffice for
      Tensor tCrA = make_tensor<Element>(
          Shape<Shape<_2, _2, _2>, Int<kRound>, Int<Traits::kWorkerWarps>>{});  // (MMA,MMA_M,token blocks)
      Tensor words = recast<uint32_t>(tCrA);                                    // pairs of tokens
      int channel[kChannels];
      CUTE_UNROLL
      for (int i = 0; i < kChannels; ++i)  // those beyond the last are not stored
        channel[i] = min(static_cast<int>(channels[16 * round + 8 * ((i + rotation) % kChannels)]), last_channel);
      CUTE_UNROLL
      for (int pair = 0; pair < 2 * Traits::kWorkerWarps; ++pair) {
        // Whatever lies where there is no token must not be multiplied by a weight of 0: zeros take its place.
        int token = Traits::TileFormat::position_of_column(8 * pair) + column,
            next = token + Traits::TileFormat::position_of_column(1);
        int low = min(token, last_token), high = min(next, last_token);
        uint32_t exists = (token < tokens_ ? 0xffffu : 0) | (next < tokens_ ? 0xffff0000u : 0);
        uint32_t loaded[kChannels];
        CUTE_UNROLL
        for (int i = 0; i < kChannels; ++i)
          loaded[i] = (bits(values.data[low * values.stride + channel[i]]) |
                       bits(values.data[high * values.stride + channel[i]]) << 16) &
                      exists;
        CUTE_UNROLL
        for (int bit = 1; bit < kChannels; bit *= 2) {  // undoes the rotation
          uint32_t before[kChannels];
          CUTE_UNROLL
          for (int i = 0; i < kChannels; ++i) before[i] = loaded[i];
          CUTE_UNROLL
          for (int i = 0; i < kChannels; ++i)
            if (rotation & bit) loaded[i] = before[(i + kChannels - bit) % kChannels];
        }
        CUTE_UNROLL
        for (int i = 0; i < kChannels; ++i) words(i % 2 + 2 * (pair % 2), i / 2, pair / 2) = loaded[i];
      }
      CUTE_UNROLL
      for (int m = 0; m < kRound; ++m) {
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
  static constexpr int kRound = Traits::kHeadDim < format::kMaxHeadDim ? 2 : 1;  // by registers: blocks of 16 channels
  static constexpr int kChannels = 2 * kRound;                                   // of a lane in a round

  Params const& params_;
  schedule::WorkTile const& work_tile_;
  int lane_ = ptx::lane_index();
  int part_, first_token_;
  int tokens_;  // from the first on

  // Of the tile's tokens.
  struct Rows {
    Element const* data;
    int stride;  // times the tokens of a window within 2^31, which dispatch/ sees to
  };

  CUTE_DEVICE Rows rows(Stage const& stage, void const* data, int64_t const (&strides)[3]) const {
    if (params_.window_staged) return {reinterpret_cast<Element const*>(stage.block), params_.keys.head_dim};
    return {static_cast<Element const*>(data) + window_offset(work_tile_, strides, first_token_),
            static_cast<int>(strides[2])};
  }

  CUTE_DEVICE static uint32_t bits(Element const& value) { return reinterpret_cast<uint16_t const&>(value); }

  // Channels [channel, channel + 8) of a row; zeros beyond the last.
  CUTE_DEVICE uint4 vector(Element const* row, int channel) const {
    if (channel >= params_.keys.head_dim) return make_uint4(0, 0, 0, 0);  // which is a multiple of 8
    if (params_.window_vectorized) return *reinterpret_cast<uint4 const*>(row + channel);
    Tensor elements = make_tensor<Element>(_8{});
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) elements(i) = row[channel + i];
    Tensor words = recast<uint32_t>(elements);
    return make_uint4(words(0), words(1), words(2), words(3));
  }
};

}  // namespace cute_kernels::attention
