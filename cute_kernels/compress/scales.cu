// The scales of channels, one CTA for a group of a head's channels.
#include "cute_kernels/common/error.hpp"
#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/compress/compress.hpp"

namespace cute_kernels::compress {
namespace {

using namespace format;

constexpr int kVector = 8;  // channels of a thread
constexpr int kGroup = 32;  // channels of a CTA: its first warp has a lane for each
constexpr int kColumns = kGroup / kVector, kThreads = kScaleSums * kColumns;

// To thread i below kGroup: the scale of channel first + i, 0 if that has no nonzero.
template <class X>
__device__ uint32_t scale_of_channel(DenseView const& x, bool vectors, unsigned head, int first) {
  __shared__ ChannelSum sums[kScaleSums][kGroup];
  int sum = threadIdx.x / kColumns, column = threadIdx.x % kColumns * kVector;
  auto const* from = x.row(head, 0) + first + column;
  int64_t tokens = first + column < x.head_dim ? x.tokens : 0;           // that these channels have
  alignas(16) uint16_t values[kScaleTokens / kScaleSums][kVector] = {};  // all on their way together; zeros add nothing
#pragma unroll
  for (int i = 0; i < kScaleTokens / kScaleSums; ++i) {
    int t = sum + i * kScaleSums;
    if (t >= tokens) continue;
    if (vectors) {
      *reinterpret_cast<uint4*>(values[i]) = *reinterpret_cast<uint4 const*>(from + t * x.stride_token);
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[i][j] = from[t * x.stride_token + j];
    }
  }
  ChannelSum of_channels[kVector];
#pragma unroll
  for (int i = 0; i < kScaleTokens / kScaleSums; ++i)
#pragma unroll
    for (int j = 0; j < kVector; ++j) of_channels[j].add(fabsf(float(reinterpret_cast<X const&>(values[i][j]))));
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kVector; ++j) sums[sum][column + j] = of_channels[j];
  __syncthreads();
  if (threadIdx.x >= kGroup) return 0;
  ChannelSum total = sums[0][threadIdx.x];
#pragma unroll
  for (int i = 1; i < kScaleSums; ++i) total.add(sums[i][threadIdx.x]);
  return total.scale();
}

// vectors: see DenseView.
template <class X>
__global__ void __launch_bounds__(kThreads)
    channel_scales_kernel(DenseView x, bool vectors, int padded, uint16_t* channel_scale, int32_t* counts,
                          int64_t* refused) {
  unsigned groups = padded / kGroup, head = blockIdx.x / groups;
  int first = blockIdx.x % groups * kGroup;
  if (refused && blockIdx.x == 0 && threadIdx.x == 0) *refused = 0;
  uint32_t scale = 0, most = 0;  // most: the largest of the channels that this thread has seen
#pragma unroll 1
  for (int i = 0; i < padded; i += kGroup) {
    uint32_t found = scale_of_channel<X>(x, vectors, head, (first + i) % padded);
    if (i == 0) scale = found;
    most = max(most, found);
    // The other groups count only where a channel of this one takes the largest scale of its head.
    if (i == 0 && !__syncthreads_or(threadIdx.x < kGroup && scale == 0)) break;
  }
  if (threadIdx.x >= kGroup) return;
  most = __reduce_max_sync(~0u, most);
  if (scale == 0) scale = most ? most : kScaleOfOne;
  int64_t channel = int64_t{blockIdx.x} * kGroup + threadIdx.x;
  channel_scale[channel] = static_cast<uint16_t>(scale);
  if (counts) counts[channel] = 0;
}

}  // namespace

void channel_scales(DenseView const& x, uint16_t* channel_scale, int32_t* counts, int64_t* refused,
                    cudaStream_t stream) {
  int padded = padded_head_dim(x.head_dim);
  auto* kernel = x.dtype == DType::kBFloat16 ? channel_scales_kernel<bfloat16_t> : channel_scales_kernel<half_t>;
  kernel<<<static_cast<unsigned>(x.batch * x.kv_heads * (padded / kGroup)), kThreads, 0, stream>>>(
      x, x.has_vectors(), padded, channel_scale, counts, refused);
  check_cuda(cudaGetLastError(), "launch of channel_scales");
}

void prepare_selection(DenseView const& x, TokenScaling const& scaling, int32_t* counts, cudaStream_t stream) {
  if (scaling.chooses_channels) return channel_scales(x, scaling.channel_scale, counts, scaling.refused, stream);
  if (!counts) return;
  size_t bytes = sizeof(int32_t) * x.batch * x.kv_heads * padded_head_dim(x.head_dim);
  check_cuda(cudaMemsetAsync(counts, 0, bytes, stream), "memset of counts");
}

}  // namespace cute_kernels::compress
