// Dense rows of blocks of at most two of four, a warp and lane as in pack_slots.cu.
#include "cute_kernels/compress/slots.hpp"

namespace cute_kernels::compress {
namespace {

template <int HeadDim, class Codec>
__global__ void __launch_bounds__(kGroupThreads) unpack_slots_kernel(SparseView view, uint16_t* out) {
  using Packed = SlotTile::Packed<Codec>;
  constexpr int kAtoms = kWarpAtoms<HeadDim>;
  constexpr int kVectors = (HeadDim + 8) / kGroupVectorValues;
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<DenseRows<HeadDim>*>(shared);
  TileLocation tile(view);
  bool is_key = view.role == Role::kKey;
  int lane = threadIdx.x % 32, first_atom = threadIdx.x / 32 * kAtoms;
  for (int i = threadIdx.x; i < kTileTokens * kVectors; i += kGroupThreads)
    reinterpret_cast<uint4*>(s.element)[i] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < HeadDim; i += kGroupThreads) s.channel[i] = view.channel_order[tile.head * HeadDim + i];
  __syncthreads();
  uint32_t const* values = tile.block + SlotTile::first_value_row<Codec>(HeadDim) * kLanes + lane;
  uint32_t const* bitmap = tile.block + SlotTile::metadata_rows(HeadDim) * kLanes + lane;
  uint8_t const* token_order = view.token_order + tile.index * kTileTokens;
  auto word_of = [&](int i) { return __ldg(bitmap + i * kLanes); };
#pragma unroll 1
  for (int atom = first_atom; atom < first_atom + kAtoms; ++atom) {
    uint32_t bits = word_of(atom / 4) >> SlotTile::bitmap_bit<Codec>(kAtomSlots * (atom % 4));
    int rank = first_rank<Codec, HeadDim>(atom, word_of);
#pragma unroll
    for (int r = 0; r < SlotTile::kAtomGroups; ++r) {
      RolePlace<HeadDim> place(is_key, lane, SlotTile::kAtomGroups * atom + r);
      int metadata_lane = lane / 4 * 4 + 2 * (atom % 2) + r / 2;  // as in the kernel above
      uint32_t kept = __ldg(tile.block + atom / 2 * kLanes + metadata_lane) >> (4 * (lane % 4) + 16 * (r % 2));
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        if (!(bits >> SlotTile::bitmap_bit<Codec>(kKept * r + i) & 1)) continue;
        int at = kept >> (2 * i) & 3, token = place.token_of(at), channel = place.channel_of(at);
        uint32_t code = Packed::extract(__ldg(values + Packed::value_row(0, rank) * kLanes), 0, rank);
        ++rank;
        float of_token = scale_value(view.token_scales(tile.block)[scale_index(token)]);
        float of_channel = scale_value(view.channel_scale[tile.head * HeadDim + channel]);
        s.element[token_order[token]][s.channel[channel]] =
            rounded_bits(scaled_up(Codec::number(code), of_token, of_channel, view.dtype), view.dtype);
      }
    }
  }
  __syncthreads();
  store_rows<HeadDim>(s, tile, view, out);
}

}  // namespace

void unpack_slots(SparseView const& view, void* out, cudaStream_t stream) {
  check_tile_format(view, SlotTile::kId, "unpack_slots");
  visit_narrow_codec(view.codec, [&](auto codec) {
    visit_head_dim(view.padded_head_dim, [&](auto head_dim) {
      launch_tiles(unpack_slots_kernel<head_dim(), decltype(codec)>, view.tiles(), kGroupThreads,
                   sizeof(DenseRows<head_dim()>), stream, "launch of decompress", view, static_cast<uint16_t*>(out));
    });
  });
}

}  // namespace cute_kernels::compress
