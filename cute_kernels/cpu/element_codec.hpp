// The stored bits of one element of a dense tile, and back.
#pragma once

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/cpu/half.hpp"
#include "cute_kernels/cpu/tile_steps.hpp"

namespace cute_kernels::cpu {

inline float element_to_float(uint16_t bits, DType dtype) {
  return dtype == DType::kBFloat16 ? bfloat16_to_float(bits) : half_to_float(bits);
}

// index: token_position * padded_head_dim + channel_position.
template <class Codec>
uint32_t encode_element(SparseView const& view, TileScales const& scales, uint16_t bits, int index) {
  if constexpr (Codec::kHasScales) {
    float const per_channel = 1 / scales.channel(index % view.padded_head_dim);
    float const per_token = 1 / scales.token(index / view.padded_head_dim);
    return Codec::encode(format::scaled_down(element_to_float(bits, view.dtype), per_channel, per_token));
  } else {
    return bits;
  }
}
template <class Codec>
uint16_t decode_element(SparseView const& view, TileScales const& scales, uint32_t stored, int index) {
  if constexpr (Codec::kHasScales) {
    float const x = format::scaled_up(Codec::number(stored), scales.token(index / view.padded_head_dim),
                                      scales.channel(index % view.padded_head_dim), view.dtype);
    return view.dtype == DType::kBFloat16 ? float_to_bfloat16(x) : float_to_half(x);
  } else {
    return static_cast<uint16_t>(stored);
  }
}

}  // namespace cute_kernels::cpu
