// The scales of channels, one CTA a head.
#include <algorithm>

#include "cute_kernels/common/kernel_attributes.hpp"
#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/compress/compress.hpp"

namespace cute_kernels::compress {
namespace {

using namespace format;

constexpr int kThreads = 512, kVector = 8;  // channels of a thread

// vectors: see DenseView.
template <class X>
__global__ void __launch_bounds__(kThreads)
    channel_scales_kernel(DenseView x, bool vectors, int padded, uint16_t* channel_scale, int64_t* refused) {
  extern __shared__ __align__(8) uint8_t shared[];
  ptx::launch_dependents();
  auto* sums = reinterpret_cast<ChannelSum*>(shared);  // (kScaleSums, padded)
  __shared__ uint32_t most;
  int tokens = static_cast<int>(min(x.tokens, int64_t{kScaleTokens})), columns = padded / kVector;
  if (threadIdx.x == 0) most = 0;
  if (refused && blockIdx.x == 0 && threadIdx.x == 0) *refused = 0;
  for (int i = threadIdx.x; i < kScaleSums * columns; i += kThreads) {
    int sum = i / columns, channel = i % columns * kVector;
    ChannelSum of_channels[kVector];
    if (channel < x.head_dim) {
      auto const* from = reinterpret_cast<X const*>(x.row(blockIdx.x, 0)) + channel;
#pragma unroll 16  // loads that are on their way together
      for (int t = sum; t < tokens; t += kScaleSums) {
        alignas(16) X values[kVector];
        if (vectors) {
          *reinterpret_cast<uint4*>(values) = *reinterpret_cast<uint4 const*>(from + t * x.stride_token);
        } else {
#pragma unroll
          for (int j = 0; j < kVector; ++j) values[j] = from[t * x.stride_token + j];
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) of_channels[j].add(fabsf(float(values[j])));
      }
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) sums[sum * padded + channel + j] = of_channels[j];
  }
  __syncthreads();
  for (int channel = threadIdx.x; channel < padded; channel += kThreads) {
#pragma unroll 8
    for (int i = 1; i < kScaleSums; ++i) sums[channel].add(sums[i * padded + channel]);
    atomicMax(&most, uint32_t{sums[channel].scale()});
  }
  __syncthreads();
  for (int channel = threadIdx.x; channel < padded; channel += kThreads) {
    uint16_t scale = sums[channel].scale(), other = static_cast<uint16_t>(most ? most : kScaleOfOne);
    channel_scale[int64_t{blockIdx.x} * padded + channel] = scale ? scale : other;
  }
}

}  // namespace

void channel_scales(DenseView const& x, uint16_t* channel_scale, int64_t* refused, cudaStream_t stream) {
  int padded = padded_head_dim(x.head_dim), bytes = kScaleSums * padded * static_cast<int>(sizeof(ChannelSum));
  auto* kernel = x.dtype == DType::kBFloat16 ? channel_scales_kernel<bfloat16_t> : channel_scales_kernel<half_t>;
  allow_shared_bytes(kernel, bytes);
  kernel<<<x.batch * x.kv_heads, kThreads, bytes, stream>>>(x, x.has_vectors(), padded, channel_scale, refused);
  check_cuda(cudaGetLastError(), "launch of channel_scales");
}

}  // namespace cute_kernels::compress
