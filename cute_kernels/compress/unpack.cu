// Unpacks tiles, a warp a tile. Dense data passes through shared memory, so that global accesses are whole rows; lanes
// walk their elements in the order of the tile format.
#include "cute_kernels/compress/pages.hpp"
#include "cute_kernels/compress/tile_kernel.hpp"

namespace cute_kernels::compress {
namespace {

using namespace format;

using Codec = Fp16Codec;  // or bf16: 16-bit values are moved bit for bit
static_assert(Codec::kValuesPerRow == 1, "the row of a value is its rank");

template <int HeadDim>
struct UnpackStorage {
  uint16_t dense[kTileTokens][HeadDim];
  uint8_t token[kTileTokens];  // by position
  uint8_t channel[HeadDim];
};

// to: (tokens, head_dim).
template <Role kRole, int HeadDim>
__device__ void unpack_tile(UnpackStorage<HeadDim>& s, uint32_t const* block, uint8_t const* token_order,
                            uint8_t const* channel_order, int tokens, int head_dim, uint16_t* to) {
  constexpr auto kLayout = decltype(TileFormat::element_layout<kRole, HeadDim>()){};
  int lane = threadIdx.x;
  for (int i = lane; i < kTileTokens; i += 32) s.token[i] = token_order[i];
  for (int i = lane; i < HeadDim; i += 32) s.channel[i] = channel_order[i];
  __syncwarp();
  constexpr int kBitmapRows = TileFormat::bitmap_rows(HeadDim), kWordElements = TileFormat::kWordElements;
  int row[TileFormat::kStreams] = {};
  for (int w = 0; w < kBitmapRows; ++w) {
    uint32_t word = block[w * kLanes + lane];
    for (int i = 0; i < kWordElements; ++i) {
      int e = w * kWordElements + i, index = kLayout(lane, e), stream = TileFormat::stream(e);
      uint32_t value = 0;
      if (word >> TileFormat::bitmap_bit(e) & 1)
        value = Codec::extract(block[(kBitmapRows + row[stream]++) * kLanes + lane], stream, 0);
      s.dense[s.token[index / HeadDim]][s.channel[index % HeadDim]] = static_cast<uint16_t>(value);
    }
  }
  __syncwarp();
  for (int i = lane; i < tokens * HeadDim; i += 32)
    if (int t = i / HeadDim, c = i % HeadDim; c < head_dim) to[t * head_dim + c] = s.dense[t][c];
}

template <Role kRole, int HeadDim>
__global__ void __launch_bounds__(32) unpack_kernel(SparseView view, uint16_t* out) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<UnpackStorage<HeadDim>*>(shared);
  TileLocation tile(view);
  unpack_tile<kRole>(s, tile.block, view.token_order + tile.index * kTileTokens,
                     view.channel_order + tile.head * HeadDim, tile.tokens, view.head_dim,
                     out + (tile.head * view.tokens + tile.first_token) * view.head_dim);
}

template <Role kRole, int HeadDim>
__global__ void __launch_bounds__(32) load_kernel(SparseView view, TileRun run, uint16_t* out, int32_t* error) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<UnpackStorage<HeadDim>*>(shared);
  int head = blockIdx.x / run.tiles, tile = blockIdx.x % run.tiles, values = kTileTokens * view.head_dim;
  int64_t slot = find_slot(view, run.sequence, head, run.first_tile + tile);
  uint16_t* to = out + int64_t{blockIdx.x} * values;
  if (slot == kNoSlot) {
    for (int i = threadIdx.x; i < values; i += 32) to[i] = 0;
    if (threadIdx.x == 0) *error = 1;
    return;
  }
  unpack_tile<kRole>(s, view.blocks + view.first_row(slot) * kLanes, view.token_order + slot * kTileTokens,
                     view.channel_order + (int64_t{run.sequence} * view.kv_heads + head) * HeadDim, kTileTokens,
                     view.head_dim, to);
}

}  // namespace

void decompress(SparseView const& view, void* out, cudaStream_t stream) {
  check_codec(view);
  visit_shape(view, [&](auto role, auto head_dim) {
    launch_tiles(unpack_kernel<role(), head_dim()>, view.tiles(), 32, sizeof(UnpackStorage<head_dim()>), stream,
                 "launch of decompress", view, static_cast<uint16_t*>(out));
  });
}

void load(Pool const& pool, TileRun const& run, void* keys, void* values, cudaStream_t stream) {
  check_codec(pool.keys);
  check_codec(pool.values);
  for (SparseView const* view : {&pool.keys, &pool.values})
    visit_shape(*view, [&](auto role, auto head_dim) {
      launch_tiles(load_kernel<role(), head_dim()>, int64_t{view->kv_heads} * run.tiles, 32,
                   sizeof(UnpackStorage<head_dim()>), stream, "launch of load", *view, run,
                   static_cast<uint16_t*>(view == &pool.keys ? keys : values), pool.error);
    });
}

}  // namespace cute_kernels::compress
