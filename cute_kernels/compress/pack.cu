// Packs the tiles of a contiguous storage, one CTA a tile.
#include "cute_kernels/compress/pack_tile.hpp"
#include "cute_kernels/compress/tile_kernel.hpp"

namespace cute_kernels::compress {
namespace {

// CTAs of an SM that registers have to suffice for; shared memory fits about as many.
template <int HeadDim, class Codec>
constexpr int kResident = Codec::kHasScales && HeadDim == 128 ? 10 : 0;

template <Role kRole, int HeadDim, class Codec>
__global__ void __launch_bounds__(32 * warps_of(HeadDim), kResident<HeadDim, Codec>)
    pack_kernel(DenseView x, bool vectors, uint32_t const* masks, uint16_t const* token_scale, int64_t const* totals,
                int64_t capacity, SparseView view, int staged_rows) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& s = *reinterpret_cast<PackStorage<HeadDim, Codec::kHasScales, Codec::kHasScales>*>(shared);
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
  if constexpr (Codec::kHasScales) {
    source.dtype = view.dtype;
    source.channel_scale = view.channel_scale + tile.head * HeadDim;
    source.token_scale = token_scale + tile.index * kTileTokens;
  }
  pack_tile<kRole, HeadDim, Codec, Codec::kHasScales>(s, source, tile.block,
                                                      tile.rows - TileFormat::first_value_row<Codec>(HeadDim),
                                                      staged_rows, NoTrim{}, WholeCta{});
}

}  // namespace

void pack(DenseView const& x, uint32_t const* masks, uint16_t const* token_scale, int keep, int64_t const* totals,
          int64_t capacity, SparseView const& view, cudaStream_t stream) {
  visit_packed_codec(view.codec, [&](auto codec) {
    using Codec = decltype(codec);
    visit_shape(view, [&](auto role, auto head_dim) {
      int staged = staged_rows(head_dim(), keep);
      launch_tiles(pack_kernel<role(), head_dim(), Codec>, view.tiles(), 32 * warps_of(head_dim()),
                   sizeof(PackStorage<head_dim(), Codec::kHasScales, Codec::kHasScales>) + staged * kRowBytes, stream, "launch of pack", x,
                   x.has_vectors(), masks, token_scale, totals, capacity, view, staged);
    });
  });
}

}  // namespace cute_kernels::compress
