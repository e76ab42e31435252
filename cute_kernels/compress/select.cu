// Which elements are kept: per token the `keep` largest magnitudes, ties to the lower channel. No sort: a lane takes a
// token, turns its magnitudes into bit planes and finds the keep-th largest bit by bit, from the highest plane down.
// Each step then looks at 32 channels a word, and nothing of it crosses lanes.
#include <algorithm>
#include <cute/arch/copy_sm80.hpp>
#include <cute/pointer.hpp>

#include "cute_kernels/common/error.hpp"
#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/compress/bits.hpp"
#include "cute_kernels/compress/compress.hpp"

namespace cute_kernels::compress {
namespace {

constexpr int kHalfTokens = 32;  // of a tile: a warp's, a lane each
constexpr int kHalves = format::kTileTokens / kHalfTokens;
constexpr int kVectorValues = 8;  // of 16 bits in 16 bytes
constexpr int kMagnitudeBits = 15;

template <int Words>
struct SelectStorage {
  static constexpr int kVectors = 32 * Words / kVectorValues;
  uint4 dense[kHalfTokens][kVectors + 1];  // an odd stride: lanes that walk along their rows meet no bank conflicts
  uint32_t kept[kHalfTokens][Words];
};

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

// Starts to copy rows to shared memory, with zeros for tokens and channels that are not there.
template <int Words>
__device__ void start_rows(SelectStorage<Words>& s, DenseView const& x, Half const& half, bool vectors, int lane) {
  int tokens = half.tokens;
  uint16_t const* from = x.row(half.head, tokens ? half.first : 0);
  constexpr int kVectors = SelectStorage<Words>::kVectors;
  if (!vectors) {
    for (int t = 0; t < kHalfTokens; ++t)
      for (int c = lane; c < kVectors * kVectorValues; c += 32)
        reinterpret_cast<uint16_t*>(s.dense[t])[c] =
            t < tokens && c < x.head_dim ? from[t * x.stride_token + c] : uint16_t{0};
    return;
  }
  constexpr int kRows = 32 / kVectors;  // at a time
  int row = lane / kVectors, v = lane % kVectors;
  uint16_t const* source = from + row * x.stride_token + v * kVectorValues;
  int rows = v * kVectorValues < x.head_dim ? tokens : 0;  // that this lane's column of vectors has
#pragma unroll
  for (int t = 0; t < kHalfTokens; t += kRows) {
    ptx::cp_async_16(cute::cast_smem_ptr_to_uint(&s.dense[row + t][v]), source, row + t < rows ? 16 : 0);
    source += kRows * x.stride_token;
  }
  cute::cp_async_fence();
}

// Every NaN counts as one magnitude above infinity, see `nan_key`.
template <bool kBFloat16, int Words>
__device__ void unify_nans(uint32_t (&planes)[Words][kMagnitudeBits]) {
  constexpr int kMantissaBits = kBFloat16 ? 7 : 10;
  uint32_t special[Words], any = 0;
#pragma unroll
  for (int w = 0; w < Words; ++w) {
    special[w] = ~0u;
#pragma unroll
    for (int p = kMantissaBits; p < kMagnitudeBits; ++p) special[w] &= planes[w][p];
    any |= special[w];
  }
  if (!any) return;
#pragma unroll
  for (int w = 0; w < Words; ++w) {
    uint32_t mantissa = 0;
#pragma unroll
    for (int p = 0; p < kMantissaBits; ++p) mantissa |= planes[w][p];
    uint32_t nan = special[w] & mantissa;
#pragma unroll
    for (int p = 0; p < kMantissaBits; ++p) planes[w][p] = p == 0 ? planes[w][p] | nan : planes[w][p] & ~nan;
  }
}

// Sets the bits of the `keep` largest nonzero magnitudes.
template <int Words>
__device__ void keep_largest(uint32_t const (&planes)[Words][kMagnitudeBits], int keep, uint32_t (&kept)[Words]) {
  uint32_t candidate[Words];  // magnitudes that agree with the keep-th largest in all planes so far
#pragma unroll
  for (int w = 0; w < Words; ++w) candidate[w] = ~0u, kept[w] = 0;
  int missing = keep;
  bool positive = false;  // the keep-th largest is not zero
#pragma unroll
  for (int p = kMagnitudeBits - 1; p >= 0; --p) {
    int count = 0;
#pragma unroll
    for (int w = 0; w < Words; ++w) count += __popc(candidate[w] & planes[w][p]);
    bool enough = count >= missing;
    uint32_t same = enough ? ~0u : 0;  // the bit of the keep-th largest
    positive |= enough;
    missing -= enough ? 0 : count;
#pragma unroll
    for (int w = 0; w < Words; ++w) {
      kept[w] |= candidate[w] & planes[w][p] & ~same;
      candidate[w] &= ~(planes[w][p] ^ same);
    }
  }
  if (!positive) return;
#pragma unroll
  for (int w = 0; w < Words; ++w) {  // ties: the lowest channels
    int count = __popc(candidate[w]);
    uint32_t rest = count <= missing ? 0 : candidate[w];
    for (int i = missing; rest && i > 0; --i) rest &= rest - 1;
    kept[w] |= candidate[w] ^ rest;
    missing = max(missing - count, 0);
  }
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

// CTAs of an SM, which bounds their registers; shared memory has room for about as many.
template <int Words>
constexpr int kResident = Words == 2   ? 28
                          : Words == 4 ? 20
                                       : 11;

// A CTA takes every gridDim.x-th tile. Rows of its next half tile arrive while it selects: by then this half tile's
// are in registers.
template <int Words, bool kBFloat16>
__global__ void __launch_bounds__(32, kResident<Words>)
    select_kernel(DenseView x, int keep, bool vectors, unsigned tiles, uint32_t* masks, int32_t* counts,
                  uint16_t* pruned) {
  __shared__ SelectStorage<Words> s;
  int lane = threadIdx.x;
  unsigned tiles_per_head = static_cast<unsigned>((x.tokens + format::kTileTokens - 1) / format::kTileTokens);
  unsigned tile = blockIdx.x;
  int part = 0;  // half of the tile
  Half half(x, tiles_per_head, tile, part);
  start_rows(s, x, half, vectors, lane);
  int count[Words] = {};
  while (tile < tiles) {
    cute::cp_async_wait<0>();
    __syncwarp();
    uint32_t planes[Words][kMagnitudeBits], kept[Words];
#pragma unroll
    for (int w = 0; w < Words; ++w) {
      uint32_t pairs[16], all[16];
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        uint4 x4 = s.dense[lane][4 * w + v];
        pairs[4 * v] = x4.x, pairs[4 * v + 1] = x4.y, pairs[4 * v + 2] = x4.z, pairs[4 * v + 3] = x4.w;
      }
      to_planes(pairs, all);
#pragma unroll
      for (int p = 0; p < kMagnitudeBits; ++p) planes[w][p] = all[p];  // without the signs
    }
    __syncwarp();

    unsigned next_tile = part ? tile + gridDim.x : tile;
    int next_part = part ^ 1;
    Half next(x, tiles_per_head, next_tile, next_part);
    if (!pruned && next_tile < tiles) start_rows(s, x, next, vectors, lane);
    unify_nans<kBFloat16>(planes);
    keep_largest(planes, keep, kept);
    if (pruned) {
      uint16_t* to = pruned + (int64_t{half.head} * x.tokens + half.first) * x.head_dim;
      write_pruned(s, kept, to, half.tokens, x.head_dim, lane);
      __syncwarp();
      if (next_tile < tiles) start_rows(s, x, next, vectors, lane);
    }
    if (masks) {
#pragma unroll
      for (int w = 0; w < Words; ++w) {
        uint32_t of_channel = transpose_lanes(kept[w], lane);
        masks[((int64_t{tile} * kHalves + part) * Words + w) * 32 + lane] = of_channel;
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

void select(DenseView const& x, int keep, uint32_t* masks, int32_t* counts, void* pruned, cudaStream_t stream) {
  int padded = format::padded_head_dim(x.head_dim), heads = x.batch * x.kv_heads;
  if (masks) check_cuda(cudaMemsetAsync(counts, 0, sizeof(int32_t) * heads * padded, stream), "memset of counts");
  int64_t tiles = (x.tokens + format::kTileTokens - 1) / format::kTileTokens * heads;
  if (tiles > INT32_MAX / kHalves) throw std::invalid_argument("x: more than 2^30 tiles of 64 tokens");
  auto launch = [&](auto kernel) {
    // More than any token has: all that is not zero.
    int most = keep > 0 ? keep : format::kMaxHeadDim + 1;
    unsigned count = static_cast<unsigned>(tiles), grid = std::min(count, resident_ctas(kernel, 32));
    kernel<<<grid, 32, 0, stream>>>(x, most, x.has_vectors(), count, masks, counts, static_cast<uint16_t*>(pruned));
  };
  auto launch_words = [&](auto of_fp16, auto of_bf16) {
    if (x.dtype == DType::kBFloat16)
      launch(of_bf16);
    else
      launch(of_fp16);
  };
  if (padded == 64)
    launch_words(select_kernel<2, false>, select_kernel<2, true>);
  else if (padded == 128)
    launch_words(select_kernel<4, false>, select_kernel<4, true>);
  else
    launch_words(select_kernel<8, false>, select_kernel<8, true>);
  check_cuda(cudaGetLastError(), "launch of select");
}

}  // namespace cute_kernels::compress
