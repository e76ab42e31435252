// Selects what is kept, half a tile a warp at a time.
#include <algorithm>
#include <type_traits>

#include "cute_kernels/common/error.hpp"
#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/compress/select_tile.hpp"

namespace cute_kernels::compress {
namespace {

// Half a tile.
struct Half {
  unsigned head;
  int64_t first;  // token of the head
  int tokens;     // that exist

  __device__ Half(DenseView const& x, unsigned tiles_per_head, unsigned tile, int half) {
    head = tile / tiles_per_head;
    first = int64_t{tile % tiles_per_head} * format::kTileTokens + half * kHalfTokens;
    tokens = static_cast<int>(max(int64_t{0}, min(int64_t{kHalfTokens}, x.tokens - first)));
  }
};

template <int Words>
__device__ void start_half(SelectStorage<Words>& s, DenseView const& x, Half const& half, bool vectors, int lane) {
  start_rows(s, x.row(half.head, half.tokens ? half.first : 0), x.stride_token, x.head_dim, half.tokens, vectors, lane);
}

template <int Words>
__device__ void write_pruned(SelectStorage<Words>& s, uint32_t const (&kept)[Words], uint16_t* to, int tokens,
                             int head_dim, int lane) {
  constexpr int kVectors = SelectStorage<Words>::kVectors;
#pragma unroll
  for (int w = 0; w < Words; ++w) s.kept[lane][w] = kept[w];
  __syncwarp();
  for (int i = lane; i < tokens * kVectors; i += 32) {
    int t = i / kVectors, v = i % kVectors;
    if (v * kVectorValues >= head_dim) continue;
    uint32_t bits = s.kept[t][v / 4] >> v % 4 * kVectorValues;
    auto masked = [&](uint32_t pair, int j) {
      return pair & ((bits >> 2 * j & 1 ? 0xffffu : 0) | (bits >> (2 * j + 1) & 1 ? 0xffff0000u : 0));
    };
    uint4 x = s.dense[t][v];
    *reinterpret_cast<uint4*>(to + t * head_dim + v * kVectorValues) =
        make_uint4(masked(x.x, 0), masked(x.y, 1), masked(x.z, 2), masked(x.w, 3));
  }
}

// CTAs of an SM, which bounds their registers; shared memory fits about as many.
template <int Words, bool kScales>
constexpr int kResident = Words == 2   ? (kScales ? 24 : 28)
                          : Words == 4 ? 20
                          : kScales    ? 8
                                       : 11;

// A CTA takes every gridDim.x-th tile. Rows of its next half tile arrive while it selects: by then this half tile's
// are in registers. With scales or `pruned`, they are read once more first, when planes are done with.
template <int Words, bool kBFloat16, bool kScales>
__global__ void __launch_bounds__(32, kResident<Words, kScales>)
    select_kernel(DenseView x, int keep, bool vectors, unsigned tiles, uint32_t* masks, int32_t* counts,
                  uint16_t* pruned, TokenScaling token_scaling, LaneScaling scaling) {
  __shared__ SelectStorage<Words> s;
  __shared__ float4 per_channel[kScales ? 8 * Words : 1];
  int lane = threadIdx.x;
  unsigned tiles_per_head = static_cast<unsigned>((x.tokens + format::kTileTokens - 1) / format::kTileTokens);
  unsigned tile = blockIdx.x;
  int part = 0;  // half of the tile
  Half half(x, tiles_per_head, tile, part);
  start_half(s, x, half, vectors, lane);
  int count[Words] = {};
  while (tile < tiles) {
    cute::cp_async_wait<0>();
    __syncwarp();
    uint32_t planes[Words][kMagnitudeBits], kept[Words];
    read_planes(s, planes, lane);
    __syncwarp();

    unsigned next_tile = part ? tile + gridDim.x : tile;
    int next_part = part ^ 1;
    Half next(x, tiles_per_head, next_tile, next_part);
    if (!kScales && !pruned && next_tile < tiles) start_half(s, x, next, vectors, lane);
    unify_nans<kBFloat16>(planes);
    keep_largest(planes, keep, kept);
    if (pruned) {
      uint16_t* to = pruned + (int64_t{half.head} * x.tokens + half.first) * x.head_dim;
      write_pruned(s, kept, to, half.tokens, x.head_dim, lane);
      __syncwarp();
      if (next_tile < tiles) start_half(s, x, next, vectors, lane);
    }
    if constexpr (kScales) {
      if (part == 0) {
        uint16_t const* scales = token_scaling.channel_scale + int64_t{half.head} * 32 * Words;
#pragma unroll
        for (int w = 0; w < Words; ++w)
          reinterpret_cast<float*>(per_channel)[32 * w + lane] = 1 / format::scale_value(scales[32 * w + lane]);
      }
      uint32_t finite[Words];
      scaling.keep_finite<kBFloat16>(planes, kept, finite);
      TokenRow<Words> row(s, lane);
      __syncwarp();
      if (next_tile < tiles) start_half(s, x, next, vectors, lane);
      token_scaling.token_scale[int64_t{tile} * format::kTileTokens + part * kHalfTokens + lane] =
          scaling.token_scale<kBFloat16>(row, per_channel, finite);
    }
    if (masks || counts) {
#pragma unroll
      for (int w = 0; w < Words; ++w) {
        uint32_t of_channel = transpose_lanes(kept[w], lane);
        if (masks) masks[((int64_t{tile} * kHalves + part) * Words + w) * 32 + lane] = of_channel;
        if (!counts) continue;
        count[w] += __popc(of_channel);
        if (part == 0) continue;
        if (count[w]) atomicAdd(counts + (int64_t{half.head} * Words + w) * 32 + lane, count[w]);
        count[w] = 0;
      }
    }
    tile = next_tile;
    part = next_part;
    half = next;
  }
}

// As many CTAs as can run at a time.
template <class Kernel>
unsigned resident_ctas(Kernel kernel, int threads) {
  int device, processors, ctas;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, threads, 0), "occupancy of select");
  return static_cast<unsigned>(processors * ctas);
}

}  // namespace

void select(DenseView const& x, int keep, uint32_t* masks, int32_t* counts, void* pruned, TokenScaling const& scaling,
            cudaStream_t stream) {
  int padded = format::padded_head_dim(x.head_dim), heads = x.batch * x.kv_heads;
  prepare_selection(x, scaling, counts, stream);
  int64_t tiles = (x.tokens + format::kTileTokens - 1) / format::kTileTokens * heads;
  if (tiles > INT32_MAX / kHalves) throw std::invalid_argument("x: more than 2^30 tiles of 64 tokens");
  LaneScaling of_lanes(scaling.codec, scaling.refused);
  auto launch = [&](auto kernel) {
    unsigned count = static_cast<unsigned>(tiles), grid = std::min(count, resident_ctas(kernel, 32));
    kernel<<<grid, 32, 0, stream>>>(x, most_kept(keep), x.has_vectors(), count, masks, counts,
                                    static_cast<uint16_t*>(pruned), scaling, of_lanes);
  };
  auto launch_with = [&](auto words, auto is_bfloat16) {
    if (scaling.token_scale)
      launch(select_kernel<words(), is_bfloat16(), true>);
    else
      launch(select_kernel<words(), is_bfloat16(), false>);
  };
  format::visit_head_dim(padded, [&](auto head_dim) {
    std::integral_constant<int, head_dim() / 32> words;
    if (x.dtype == DType::kBFloat16)
      launch_with(words, std::true_type{});
    else
      launch_with(words, std::false_type{});
  });
  check_cuda(cudaGetLastError(), "launch of select");
}

}  // namespace cute_kernels::compress
