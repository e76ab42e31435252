// Packs the tiles of a contiguous storage, one CTA a tile.
#include "cute_kernels/compress/pack_tile.hpp"
#include "cute_kernels/compress/tile_kernel.hpp"

namespace cute_kernels::compress {
namespace {

template <Role kRole, int HeadDim>
__global__ void __launch_bounds__(32 * warps_of(HeadDim))
    pack_kernel(DenseView x, bool vectors, uint32_t const* masks, int64_t const* totals, int64_t capacity,
                SparseView view, int staged_rows) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& s = *reinterpret_cast<PackStorage<HeadDim>*>(shared);
  if (*totals > capacity) return;
  TileLocation tile(view);
  TileSource source;
  source.rows = x.row(tile.head, tile.first_token);
  source.stride_token = x.stride_token;
  source.tokens = tile.tokens;
  source.head_dim = x.head_dim;
  source.vectors = vectors;
  source.masks = masks + tile.index * kTileTokens * (HeadDim / 32);
  source.channel_order = view.channel_order + tile.head * HeadDim;
  source.token_order = view.token_order + tile.index * kTileTokens;
  pack_tile<kRole, HeadDim>(s, source, tile.block, tile.rows - TileFormat::bitmap_rows(HeadDim), staged_rows, NoTrim{},
                            WholeCta{});
}

}  // namespace

void pack(DenseView const& x, uint32_t const* masks, int keep, int64_t const* totals, int64_t capacity,
          SparseView const& view, cudaStream_t stream) {
  check_codec(view);
  visit_shape(view, [&](auto role, auto head_dim) {
    int staged = staged_rows(head_dim(), keep);
    launch_tiles(pack_kernel<role(), head_dim()>, view.tiles(), 32 * warps_of(head_dim()),
                 sizeof(PackStorage<head_dim()>) + staged * kRowBytes, stream, "launch of pack", x, x.has_vectors(),
                 masks, totals, capacity, view, staged);
  });
}

}  // namespace cute_kernels::compress
