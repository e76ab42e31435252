// Unpacks tiles, a warp a tile. Dense data passes through shared memory, so that global accesses are whole rows; lanes
// walk their elements in the order of format/tile.hpp.
#include "cute_kernels/compress/tile_kernel.hpp"

namespace cute_kernels::compress {
namespace {

using namespace format;

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

}  // namespace

void decompress(SparseView const& view, void* out, cudaStream_t stream) {
  visit_shape(view, [&](auto role, auto head_dim) {
    launch_tiles(unpack_kernel<role(), head_dim()>, view, 32, sizeof(UnpackStorage<head_dim()>), stream,
                 "launch of decompress", view, static_cast<uint16_t*>(out));
  });
}

}  // namespace cute_kernels::compress
