// Dense tokens of the window, put into operand stages by decoders: channels of keys in the order of the compressed keys',
// those of values in that of theirs. Tokens keep their order.
#pragma once

#include <cutlass/arch/memory.h>

#include "cute_kernels/ops/attention/prefill/channel_scales.hpp"

namespace cute_kernels::attention::prefill {

// Tiles of keys or of values, with all threads of a decoder. A thread has the same 8 channels of several tokens, two such
// vectors with a head_dim of 256.
template <class Traits>
class WindowCopy {
 public:
  CUTE_DEVICE WindowCopy(Params const& params, WorkTile const& work_tile, Storage<Traits>& storage, int decoder,
                         bool is_value)
      : params_(params),
        work_tile_(work_tile),
        view_(is_value ? params.values : params.keys),
        places_(storage.window_places[decoder]),
        is_value_(is_value),
        warp_(threadIdx.x % kWarpgroupThreads / 32),
        lane_(threadIdx.x % 32),
        token_stride_(static_cast<int>(is_value ? params.window.value_strides[2] : params.window.key_strides[2])) {
    int64_t const* strides = is_value ? params.window.value_strides : params.window.key_strides;
    elements_ = static_cast<uint16_t const*>(is_value ? params.window.values : params.window.keys) +
                work_tile.sequence * strides[0] + work_tile.kv_head * strides[1];
  }

  // Prefetches a tile, which is copied later, to L1.
  CUTE_DEVICE void prefetch(int first_token) const {
    CUTE_NO_UNROLL
    for (int group = first_group(); group < kGroups; group += kWarpgroupWarps) {
      CUTE_NO_UNROLL
      for (int token = first_token_of_lane(); token < format::kTileTokens; token += kTokenStep)
        if (exists(first_token + token, channel(group)))
          ptx::prefetch(elements_of(first_token + token, channel(group)));
    }
  }

  // stage: shared-memory address of (tokens,channels) of keys, or (channels,tokens) of values. Zeros beyond the last token
  // and channel.
  CUTE_DEVICE void run(int first_token, uint32_t stage) {
    find_places();
    CUTE_NO_UNROLL
    for (int group = first_group(); group < kGroups; group += kWarpgroupWarps) {
      int first_channel = channel(group);
      alignas(16) uint16_t offsets[kVector];
      *reinterpret_cast<uint4*>(offsets) = *reinterpret_cast<uint4 const*>(places_.offset + first_channel);
      CUTE_NO_UNROLL
      for (int token = first_token_of_lane(); token < format::kTileTokens; token += kAtOnce * kTokenStep) {
        alignas(16) uint16_t elements[kAtOnce][kVector];
        load(first_token + token, first_channel, elements);
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          uint32_t of_token = offset_of_token(token + i * kTokenStep);
          CUTE_UNROLL
          for (int j = 0; j < kVector; ++j) store(first_channel + j, elements[i][j], stage + (offsets[j] ^ of_token));
        }
      }
    }
  }

 private:
  using Order = typename Traits::Order;
  using OffsetsK = typename Traits::template Offsets<typename Traits::SmemLayoutK>;  // (tokens,channels)
  using OffsetsV = typename Traits::template Offsets<typename Traits::SmemLayoutV>;  // (channels,tokens)

  // A warp loads 4 vectors of 8 tokens at a time, and stores to 8 rows of keys, or 8 columns of values.
  static constexpr int kGroups = Traits::kHeadDim / (4 * kVector),
                       kGroupWarps = cute::max(1, kWarpgroupWarps / kGroups);
  static constexpr int kTokenStep = 8 * kGroupWarps;              // of a lane
  static constexpr int kAtOnce = Traits::kDecodesNarrow ? 2 : 4;  // loads under way
  static_assert(format::kTileTokens % (kAtOnce * kTokenStep) == 0);

  Params const& params_;
  WorkTile const& work_tile_;
  format::SparseView const& view_;
  WindowPlaces<Traits>& places_;
  bool is_value_;
  int warp_, lane_;
  int token_stride_;          // elements; offsets in a window fit in 32 bits: see check_window in dispatch/
  uint16_t const* elements_;  // of the KV head

  CUTE_DEVICE int first_group() const { return warp_ % kGroups; }
  CUTE_DEVICE int channel(int group) const { return (4 * group + lane_ / 8) * kVector; }
  CUTE_DEVICE int first_token_of_lane() const { return warp_ / kGroups % kGroupWarps * 8 + lane_ % 8; }
  CUTE_DEVICE bool exists(int token, int channel) const {
    return token < work_tile_.window_tokens && channel < view_.head_dim;
  }
  CUTE_DEVICE uint16_t const* elements_of(int token, int channel) const {
    return elements_ + token * token_stride_ + channel;
  }

  // Bytes from the beginning of a stage. An element's offset is the exclusive or of its channel's and its token's.
  CUTE_DEVICE uint32_t offset_of_token(int token) const {
    return sizeof(uint16_t) * (is_value_ ? OffsetsV{}(0, token) : OffsetsK{}(token, 0));
  }
  static_assert(is_separable(OffsetsK{}, format::kTileTokens, Traits::kHeadDim) &&
                is_separable(OffsetsV{}, Traits::kHeadDim, format::kTileTokens));

  // Where channels go, and what their elements are multiplied by.
  CUTE_DEVICE void find_places() {
    uint8_t const* order = view_.channel_order_of(work_tile_.sequence, work_tile_.kv_head);
    sync_warpgroup();  // all have used those of the tile before
    CUTE_NO_UNROLL
    for (int place = threadIdx.x % kWarpgroupThreads; place < Traits::kHeadDim; place += kWarpgroupThreads) {
      int position = is_value_ ? Order::channel_of_row(place) : Order::position_of_column(place);
      int channel = __ldg(order + position);
      int offset = is_value_ ? OffsetsV{}(place, 0) : OffsetsK{}(0, place);
      places_.offset[channel] = static_cast<uint16_t>(sizeof(uint16_t) * offset);
      if constexpr (Traits::kDecodesNarrow) {
        if (ChannelScales<Traits>::exist(params_)) {
          uint16_t scale = __ldg(view_.channel_scale_of(work_tile_.sequence, work_tile_.kv_head) + position);
          places_.inverse_scale[channel] = 1 / format::scale_value(scale);
        }
      }
    }
    sync_warpgroup();
  }

  // The lane's elements of kAtOnce tokens. One branch by window_vectorized is around all of them: loads between which a
  // predicate chooses would wait for one another, as they have the same registers.
  CUTE_DEVICE void load(int first_token, int channel, uint16_t (&elements)[kAtOnce][kVector]) const {
    auto for_each = [&](auto&& f) {
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        int token = first_token + i * kTokenStep;
        *reinterpret_cast<uint4*>(elements[i]) = make_uint4(0, 0, 0, 0);
        if (exists(token, channel)) f(elements[i], elements_of(token, channel));
      }
    };
    if (params_.window_vectorized) {
      for_each([](uint16_t (&to)[kVector], uint16_t const* from) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4 const*>(from);
      });
    } else {
      for_each([](uint16_t (&to)[kVector], uint16_t const* from) {
        CUTE_UNROLL
        for (int j = 0; j < kVector; ++j) to[j] = from[j];
      });
    }
  }

  CUTE_DEVICE void store(int channel, uint16_t bits, uint32_t address) const {
    bits = to_stored(channel, bits);
    cutlass::arch::shared_store<2>(address, &bits);
  }

  // Bits of an element of the cache's dtype as they are multiplied: divided by its channel's scale as compressed ones are,
  // as fp16, no larger than its largest number unless infinite.
  CUTE_DEVICE uint16_t to_stored(int channel, uint16_t bits) const {
    if constexpr (Traits::kDecodesNarrow) {
      if (ChannelScales<Traits>::exist(params_)) {
        constexpr float kLargest = 65504;
        float x = from_half_bits(bits, params_.keys.dtype), relative = x * places_.inverse_scale[channel];
        if (fabsf(relative) > kLargest && isfinite(x)) relative = copysignf(kLargest, x);
        return half_t(relative).raw();
      }
    }
    return bits;
  }
};

}  // namespace cute_kernels::attention::prefill
