// Packs tiles and unpacks them, one CTA a tile. Dense data passes through shared memory, so that global accesses are
// whole rows; lanes then walk their elements in the order of format/tile.hpp.
#include <type_traits>

#include "cute_kernels/common/error.hpp"
#include "cute_kernels/compress/compress.hpp"

namespace cute_kernels::compress {
namespace {

using namespace format;

constexpr int kWarps = 4;  // each takes a quarter of every lane's bitmap words

// Where a tile lies in the storage and in the dense tensor.
struct TilePlace {
  int64_t tile, head, first_token;
  int tokens;  // that exist
  uint32_t* block;
  int rows;

  __device__ TilePlace(SparseView const& view) {
    tile = blockIdx.x;
    head = tile / view.tiles_per_head();
    first_token = tile % view.tiles_per_head() * kTileTokens;
    tokens = static_cast<int>(min(int64_t{kTileTokens}, view.tokens - first_token));
    block = const_cast<uint32_t*>(view.blocks) + int64_t{view.row_offsets[tile]} * kLanes;
    rows = view.row_offsets[tile + 1] - view.row_offsets[tile];
  }
};

template <int HeadDim>
struct TileOrder {
  uint8_t token[kTileTokens];  // by position
  uint8_t channel[HeadDim];

  __device__ void load(SparseView const& view, TilePlace const& place) {
    for (int i = threadIdx.x; i < kTileTokens; i += blockDim.x)
      token[i] = view.token_order[place.tile * kTileTokens + i];
    for (int i = threadIdx.x; i < HeadDim; i += blockDim.x) channel[i] = view.channel_order[place.head * HeadDim + i];
  }
};

struct Element {
  int token, channel;
};

template <int HeadDim>
struct PackStorage {
  uint16_t dense[kTileTokens][HeadDim];
  uint32_t masks[kTileTokens][HeadDim / 32];
  uint32_t values[lane_elements(HeadDim) / Codec16::kStreams][kLanes];
  int lengths[kWarps][kLanes][Codec16::kStreams];
  TileOrder<HeadDim> order;
};

template <Role kRole, int HeadDim>
__global__ void __launch_bounds__(32 * kWarps) pack_kernel(DenseView x, uint32_t const* masks, SparseView view) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<PackStorage<HeadDim>*>(shared);
  constexpr auto kLayout = decltype(element_layout<kRole, HeadDim>()){};
  constexpr int kWords = bitmap_rows(HeadDim) / kWarps;  // of this warp
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  TilePlace place(view);
  int value_rows = place.rows - bitmap_rows(HeadDim);

  s.order.load(view, place);
  auto const* from = static_cast<uint16_t const*>(x.data) + place.head / x.kv_heads * x.stride_batch +
                     place.head % x.kv_heads * x.stride_head + place.first_token * x.stride_token;
  for (int i = threadIdx.x; i < place.tokens * HeadDim; i += blockDim.x)
    if (int t = i / HeadDim, c = i % HeadDim; c < x.head_dim) s.dense[t][c] = from[t * x.stride_token + c];
  for (int i = threadIdx.x; i < kTileTokens * (HeadDim / 32); i += blockDim.x) {
    int t = i / (HeadDim / 32), w = i % (HeadDim / 32);
    s.masks[t][w] = t < place.tokens ? masks[(place.head * x.tokens + place.first_token + t) * (HeadDim / 32) + w] : 0;
  }
  for (int i = threadIdx.x; i < value_rows * kLanes; i += blockDim.x) s.values[i / kLanes][i % kLanes] = 0;
  __syncthreads();

  // The stream of an element follows from its place in the word alone, so unrolled loops keep counters in registers.
  static_assert(kWordElements % Codec16::kStreams == 0);
  uint32_t words[kWords] = {};
  int length[Codec16::kStreams] = {};
  auto at = [&](int e) {  // this lane's element e
    int index = kLayout(lane, e);
    return Element{s.order.token[index / HeadDim], s.order.channel[index % HeadDim]};
  };
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
#pragma unroll 4
    for (int i = 0; i < kWordElements; ++i) {
      int e = (warp * kWords + w) * kWordElements + i;
      auto [token, channel] = at(e);
      uint32_t present = s.masks[token][channel / 32] >> channel % 32 & 1;
      words[w] |= present << bitmap_bit(e);
      length[Codec16::stream(i)] += present;
    }
    place.block[(warp * kWords + w) * kLanes + lane] = words[w];
  }
  for (int j = 0; j < Codec16::kStreams; ++j) s.lengths[warp][lane][j] = length[j];
  __syncthreads();

  int row[Codec16::kStreams] = {};
  for (int j = 0; j < Codec16::kStreams; ++j)
    for (int w = 0; w < warp; ++w) row[j] += s.lengths[w][lane][j];
  auto* values = reinterpret_cast<uint16_t*>(s.values);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
#pragma unroll 4
    for (int i = 0; i < kWordElements; ++i) {
      int e = (warp * kWords + w) * kWordElements + i;
      if (!(words[w] >> bitmap_bit(e) & 1)) continue;
      auto [token, channel] = at(e);
      int stream = Codec16::stream(i);
      values[(row[stream]++ * kLanes + lane) * Codec16::kStreams + stream] = s.dense[token][channel];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < value_rows * kLanes; i += blockDim.x)
    place.block[bitmap_rows(HeadDim) * kLanes + i] = s.values[i / kLanes][i % kLanes];
}

template <int HeadDim>
struct UnpackStorage {
  uint16_t dense[kTileTokens][HeadDim];
  TileOrder<HeadDim> order;
};

template <Role kRole, int HeadDim>
__global__ void __launch_bounds__(32) unpack_kernel(SparseView view, uint16_t* out) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<UnpackStorage<HeadDim>*>(shared);
  constexpr auto kLayout = decltype(element_layout<kRole, HeadDim>()){};
  int lane = threadIdx.x;
  TilePlace place(view);
  s.order.load(view, place);
  __syncwarp();
  int row[Codec16::kStreams] = {};
  for (int w = 0; w < bitmap_rows(HeadDim); ++w) {
    uint32_t word = place.block[w * kLanes + lane];
    for (int i = 0; i < kWordElements; ++i) {
      int e = w * kWordElements + i, index = kLayout(lane, e), stream = Codec16::stream(e);
      uint32_t value = 0;
      if (word >> bitmap_bit(e) & 1)
        value = Codec16::extract(place.block[(bitmap_rows(HeadDim) + row[stream]++) * kLanes + lane], stream);
      s.dense[s.order.token[index / HeadDim]][s.order.channel[index % HeadDim]] = static_cast<uint16_t>(value);
    }
  }
  __syncwarp();
  auto* to = out + (place.head * view.tokens + place.first_token) * view.head_dim;
  for (int i = lane; i < place.tokens * HeadDim; i += 32)
    if (int t = i / HeadDim, c = i % HeadDim; c < view.head_dim) to[t * view.head_dim + c] = s.dense[t][c];
}

template <class F>
void visit_shape(SparseView const& view, F&& f) {
  auto visit_role = [&](auto head_dim) {
    if (view.role == Role::kKey) f(std::integral_constant<Role, Role::kKey>{}, head_dim);
    else f(std::integral_constant<Role, Role::kValue>{}, head_dim);
  };
  if (view.padded_head_dim == 64) visit_role(std::integral_constant<int, 64>{});
  else if (view.padded_head_dim == 128) visit_role(std::integral_constant<int, 128>{});
  else visit_role(std::integral_constant<int, 256>{});
}

template <class Kernel, class... Args>
void launch(Kernel kernel, SparseView const& view, int threads, size_t shared_bytes, cudaStream_t stream,
            char const* what, Args... args) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
             "cudaFuncSetAttribute");
  kernel<<<static_cast<unsigned>(view.tiles()), threads, shared_bytes, stream>>>(args...);
  check_cuda(cudaGetLastError(), what);
}

}  // namespace

void pack(DenseView const& x, uint32_t const* masks, SparseView const& view, cudaStream_t stream) {
  visit_shape(view, [&](auto role, auto head_dim) {
    launch(pack_kernel<role(), head_dim()>, view, 32 * kWarps, sizeof(PackStorage<head_dim()>), stream,
           "launch of pack", x, masks, view);
  });
}

void decompress(SparseView const& view, void* out, cudaStream_t stream) {
  visit_shape(view, [&](auto role, auto head_dim) {
    launch(unpack_kernel<role(), head_dim()>, view, 32, sizeof(UnpackStorage<head_dim()>), stream,
           "launch of decompress", view, static_cast<uint16_t*>(out));
  });
}

}  // namespace cute_kernels::compress
