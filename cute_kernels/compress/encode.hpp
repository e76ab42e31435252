// Codes of narrow codecs from numbers relative to their scales.
#pragma once

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/common/ptx_bytes.hpp"
#include "cute_kernels/format/codec/codec.hpp"

namespace cute_kernels::compress {

using namespace format;

// What is left of `scaled_down` once x has been scaled by its channel: as there, not contracted with a sum that follows.
__device__ inline float scaled_by_token(float product, float per_token_scale) {
  return __fmul_rn(product, per_token_scale);
}

// Four codes, a byte each.
template <class Codec>
__device__ uint32_t encode_four(float const (&x)[4]) {
#if __CUDA_ARCH__ >= 890
  if constexpr (Codec::kId == CodecId::kFp8) return ptx::floats_to_four_e4m3(x);
#endif
  uint32_t first = ptx::permute_bytes(Codec::encode(x[0]), Codec::encode(x[1]), 0x0040),
           second = ptx::permute_bytes(Codec::encode(x[2]), Codec::encode(x[3]), 0x0040);
  return ptx::permute_bytes(first, second, 0x5410);
}

// As many as a word of values has, in its order.
template <class Codec>
__device__ uint32_t encode_word(float const (&x)[32 / Codec::kValueBits]) {
  uint32_t codes = encode_four<Codec>({x[0], x[1], x[2], x[3]});
  if constexpr (Codec::kValueBits == 4) {
    auto in_half = [](uint32_t codes) {
      codes = (codes | codes >> 4) & 0x00ff00ff;
      return (codes | codes >> 8) & 0xffff;
    };
    codes = in_half(codes) | in_half(encode_four<Codec>({x[4], x[5], x[6], x[7]})) << 16;
  }
  return codes;
}

}  // namespace cute_kernels::compress
