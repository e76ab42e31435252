// Deals the channels of every head to the classes by density, and counts up where the tiles' blocks begin.
#include "cute_kernels/common/error.hpp"
#include "cute_kernels/compress/compress.hpp"
#include "cute_kernels/compress/deal_head.hpp"
#include "cute_kernels/compress/destination.hpp"

namespace cute_kernels::compress {
namespace {

using namespace format;

// One CTA a head, one thread a channel. grouped: so many channels to groups of four; 0: all to classes. from_scale: by
// channel, to_scale: by position; null: no scales.
__global__ void deal_kernel(int32_t const* counts, int grouped, uint8_t* channel_order, uint16_t const* from_scale,
                            uint16_t* to_scale, Destination to, NewOrder order) {
  __shared__ int32_t count[kMaxHeadDim];
  int channels = blockDim.x, channel = threadIdx.x;
  int64_t index = to.deals(order, blockIdx.x) ? to.order_index(blockIdx.x) : -1;
  if (index < 0) return;
  count[channel] = counts[int64_t{blockIdx.x} * channels + channel];
  __syncthreads();
  int64_t position = index * channels +
                     (grouped ? grouped_position(count, grouped, channel) : dealt_position(count, channels, channel));
  channel_order[position] = static_cast<uint8_t>(channel);
  if (from_scale) to_scale[position] = from_scale[int64_t{blockIdx.x} * channels + channel];
}

// Likewise, a thread a position.
__global__ void load_scales_kernel(SparseView view, Destination to, NewOrder order, uint16_t* channel_scale) {
  int channels = blockDim.x;
  int64_t index = to.order_index(blockIdx.x);
  if (to.deals(order, blockIdx.x)) return;
  int channel = index < 0 ? threadIdx.x : view.channel_order[index * channels + threadIdx.x];
  channel_scale[int64_t{blockIdx.x} * channels + channel] =
      index < 0 ? kScaleOfOne : view.channel_scale[index * channels + threadIdx.x];
}

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

__device__ int64_t warp_sum(int64_t x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Of all threads of the CTA; `scratch` has an entry for every warp.
__device__ int64_t cta_sum(int64_t x, int64_t* scratch) {
  __syncthreads();
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(scratch[threadIdx.x % 32]);
}

// A CTA computes the offsets of 1024 tiles and adds up all tiles before them itself: reading those few bytes again
// costs less than waiting for other CTAs. The last one has then seen all tiles and writes the totals.
__global__ void __launch_bounds__(kThreads)
    offsets_kernel(int32_t const* longest, int64_t tiles, TileRows rows_of, int32_t const* counts, int64_t channels,
                   int32_t* row_offsets, int64_t* totals) {
  __shared__ int64_t scratch[kWarps];
  int64_t first = int64_t{blockIdx.x} * kThreads, tile = first + threadIdx.x;
  int64_t before = 0;
  int most = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < first; i += kThreads) {
    before += rows_of.of(longest[i]);
    most = max(most, rows_of.of(longest[i]));
  }
  before = cta_sum(before, scratch);

  int rows = tile < tiles ? rows_of.of(longest[tile]) : 0, up_to = rows;
  most = max(most, rows);
  for (int step = 1; step < 32; step *= 2) {
    int lower = __shfl_up_sync(~0u, up_to, step);
    if (threadIdx.x % 32 >= step) up_to += lower;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 31) scratch[threadIdx.x / 32] = up_to;
  __syncthreads();
  int64_t of_lower_warps = warp_sum(threadIdx.x % 32 < threadIdx.x / 32 ? scratch[threadIdx.x % 32] : 0);
  int64_t end = before + of_lower_warps + up_to;
  if (tile < tiles) row_offsets[tile + 1] = static_cast<int32_t>(end);
  if (tile == 0) row_offsets[0] = 0;
  if (blockIdx.x + 1 < gridDim.x) return;

  int64_t nonzeros = 0;
  for (int64_t i = threadIdx.x; i < channels; i += kThreads) nonzeros += counts[i];
  nonzeros = cta_sum(nonzeros, scratch);
  most = __reduce_max_sync(~0u, most);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = most;
  __syncthreads();
  most = __reduce_max_sync(~0u, static_cast<int>(scratch[threadIdx.x % 32]));
  if (threadIdx.x == kThreads - 1) totals[0] = end, totals[1] = most, totals[2] = nonzeros;
}

}  // namespace

void deal(int32_t const* counts, int heads, int padded_head_dim, int grouped, uint8_t* channel_order,
          uint16_t const* from_scale, uint16_t* to_scale, cudaStream_t stream) {
  deal_kernel<<<heads, padded_head_dim, 0, stream>>>(counts, grouped, channel_order, from_scale, to_scale,
                                                     Destination{}, NewOrder::kAlways);
  check_cuda(cudaGetLastError(), "launch of deal");
}

void deal(int32_t const* counts, uint16_t const* channel_scale, int heads, SparseView const& view,
          Destination const& to, NewOrder order, cudaStream_t stream) {
  deal_kernel<<<heads, view.padded_head_dim, 0, stream>>>(counts, 0, const_cast<uint8_t*>(view.channel_order),
                                                          channel_scale, const_cast<uint16_t*>(view.channel_scale), to,
                                                          order);
  check_cuda(cudaGetLastError(), "launch of deal");
}

void load_scales(SparseView const& view, Destination const& to, NewOrder order, int heads, uint16_t* channel_scale,
                 cudaStream_t stream) {
  load_scales_kernel<<<heads, view.padded_head_dim, 0, stream>>>(view, to, order, channel_scale);
  check_cuda(cudaGetLastError(), "launch of load_scales");
}

void offsets(int32_t const* longest, int64_t tiles, int32_t const* counts, int heads, int padded_head_dim,
             CodecId codec, TileFormatId tile_format, int32_t* row_offsets, int64_t* totals, cudaStream_t stream) {
  TileRows rows_of(codec, tile_format, padded_head_dim);
  unsigned grid = static_cast<unsigned>((tiles + kThreads - 1) / kThreads);
  offsets_kernel<<<grid, kThreads, 0, stream>>>(longest, tiles, rows_of, counts, int64_t{heads} * padded_head_dim,
                                                row_offsets, totals);
  check_cuda(cudaGetLastError(), "launch of offsets");
}

}  // namespace cute_kernels::compress
