// Scales of channels of a narrow codec: q is multiplied by those of keys, O by those of values.
#pragma once

#include "cute_kernels/mma/scales.hpp"
#include "cute_kernels/ops/attention/prefill/storage.hpp"

namespace cute_kernels::attention::prefill {

inline constexpr int kVector = 8;  // elements of q and of the output that are loaded or stored at once

// In shared memory, for one consumer, in the order of memory.
template <class Traits>
class ChannelScales {
 public:
  CUTE_DEVICE ChannelScales(Params const& params, WorkTile const& work_tile, Storage<Traits>& storage, int consumer)
      : params_(params), work_tile_(work_tile), storage_(storage), consumer_(consumer) {}

  CUTE_DEVICE static bool exist(Params const& params) { return Traits::kDecodesNarrow && params.keys.channel_scale; }

  // With all threads of the consumer, if they exist. meanwhile(): while they are loaded, or alone.
  template <class F>
  CUTE_DEVICE void load(F&& meanwhile) {
    if constexpr (!Traits::kDecodesNarrow) {
      meanwhile();
    } else {
      constexpr int kThreadChannels = (Traits::kHeadDim + kWarpgroupThreads - 1) / kWarpgroupThreads;
      int channels[2][kThreadChannels];
      uint16_t scales[2][kThreadChannels];
      auto for_each = [&](auto&& f) {
        if (!exist(params_)) return;
        CUTE_UNROLL
        for (int role = 0; role < 2; ++role) {
          CUTE_UNROLL
          for (int i = 0; i < kThreadChannels; ++i) {
            int position = threadIdx.x % kWarpgroupThreads + i * kWarpgroupThreads;
            if (position < Traits::kHeadDim) f(role, i, position);
          }
        }
      };
      for_each([&](int role, int i, int position) {
        format::SparseView const& view = role == 0 ? params_.keys : params_.values;
        channels[role][i] = __ldg(view.channel_order_of(work_tile_.sequence, work_tile_.kv_head) + position);
        scales[role][i] = __ldg(view.channel_scale_of(work_tile_.sequence, work_tile_.kv_head) + position);
      });
      meanwhile();
      for_each([&](int role, int i, int) {
        storage_.channel_scales[consumer_][role][channels[role][i]] = format::scale_value(scales[role][i]);
      });
      sync_warpgroup();
    }
  }

  // Those of a vector of channels.
  CUTE_DEVICE void get(format::Role role, int channel, float (&scales)[kVector]) const {
    if constexpr (Traits::kDecodesNarrow) {
      auto const* from =
          reinterpret_cast<float4 const*>(storage_.channel_scales[consumer_][static_cast<int>(role)] + channel);
      reinterpret_cast<float4*>(scales)[0] = from[0], reinterpret_cast<float4*>(scales)[1] = from[1];
    }
  }

 private:
  Params const& params_;
  WorkTile const& work_tile_;
  Storage<Traits>& storage_;
  int consumer_;
};

}  // namespace cute_kernels::attention::prefill
