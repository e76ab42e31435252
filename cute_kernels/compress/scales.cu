// The scales of channels, one CTA for a head.
#include <algorithm>

#include "cute_kernels/common/error.hpp"
#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/compress/compress.hpp"

namespace cute_kernels::compress {
namespace {

using namespace format;

constexpr int kVector = 8;  // channels of a thread
template <int kPadded>
constexpr int kChannelsAtOnce = std::min(kPadded, 128);  // of a CTA
template <int kPadded>
constexpr int kThreads = kScaleSums * kChannelsAtOnce<kPadded> / kVector;

// To thread i below kChannels: the scale of channel first + i by its own nonzeros, 0 if it has none.
template <class X, int kChannels>
__device__ uint16_t scale_of_channel(DenseView const& x, bool vectors, int first) {
  constexpr int kColumns = kChannels / kVector;
  __shared__ ChannelSum sums[kScaleSums][kChannels];
  int sum = threadIdx.x / kColumns, column = threadIdx.x % kColumns * kVector;
  auto const* from = x.row(blockIdx.x, 0) + first + column;
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
  if (threadIdx.x >= kChannels) return 0;
  ChannelSum total = sums[0][threadIdx.x];
#pragma unroll
  for (int i = 1; i < kScaleSums; ++i) total.add(sums[i][threadIdx.x]);
  return total.scale();
}

// vectors: see DenseView.
template <class X, int kPadded>
__global__ void __launch_bounds__(kThreads<kPadded>)
    channel_scales_kernel(DenseView x, bool vectors, uint16_t* channel_scale, int32_t* counts, int64_t* refused) {
  constexpr int kChannels = kChannelsAtOnce<kPadded>, kPasses = kPadded / kChannels;
  __shared__ unsigned most;
  if (threadIdx.x == 0) most = 0;
  if (refused && blockIdx.x == 0 && threadIdx.x == 0) *refused = 0;
  uint16_t own[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) own[i] = scale_of_channel<X, kChannels>(x, vectors, i * kChannels);
  if (threadIdx.x < kChannels) {
    unsigned largest = own[0];
#pragma unroll
    for (int i = 1; i < kPasses; ++i) largest = max(largest, unsigned{own[i]});
    largest = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0) atomicMax(&most, largest);
  }
  __syncthreads();
  if (threadIdx.x >= kChannels) return;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    int64_t channel = int64_t{blockIdx.x} * kPadded + i * kChannels + threadIdx.x;
    channel_scale[channel] = format::channel_scale(own[i], static_cast<uint16_t>(most));
    if (counts) counts[channel] = 0;
  }
}

template <class X>
void launch(DenseView const& x, uint16_t* channel_scale, int32_t* counts, int64_t* refused, cudaStream_t stream) {
  visit_head_dim(padded_head_dim(x.head_dim), [&](auto padded) {
    channel_scales_kernel<X, padded()><<<static_cast<unsigned>(x.batch * x.kv_heads), kThreads<padded()>, 0, stream>>>(
        x, x.has_vectors(), channel_scale, counts, refused);
  });
}

}  // namespace

void channel_scales(DenseView const& x, uint16_t* channel_scale, int32_t* counts, int64_t* refused,
                    cudaStream_t stream) {
  auto* launch_for_dtype = x.dtype == DType::kBFloat16 ? launch<bfloat16_t> : launch<half_t>;
  launch_for_dtype(x, channel_scale, counts, refused, stream);
  check_cuda(cudaGetLastError(), "launch of channel_scales");
}

void prepare_selection(DenseView const& x, TokenScaling const& scaling, int32_t* counts, cudaStream_t stream) {
  if (scaling.chooses_channels) return channel_scales(x, scaling.channel_scale, counts, scaling.refused, stream);
  if (!counts) return;
  size_t bytes = sizeof(int32_t) * x.batch * x.kv_heads * padded_head_dim(x.head_dim);
  check_cuda(cudaMemsetAsync(counts, 0, bytes, stream), "memset of counts");
}

}  // namespace cute_kernels::compress
