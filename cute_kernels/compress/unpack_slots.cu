// Dense rows of blocks of at most two of four, a warp and lane as in pack_slots.cu.
#include "cute_kernels/compress/slots.hpp"

namespace cute_kernels::compress {
namespace {

// By position.
template <int HeadDim>
struct SlotUnpackStorage : DenseRows<HeadDim> {
  float of_channel[HeadDim], of_token[kTileTokens];  // scales
  uint8_t token[kTileTokens];
};

template <int HeadDim, class Codec>
__global__ void __launch_bounds__(kGroupThreads, HeadDim == kMaxHeadDim ? 2 : 4)
    unpack_slots_kernel(SparseView view, uint16_t* out) {
  using Packed = SlotTile::Packed<Codec>;
  constexpr int kAtoms = kWarpAtoms<HeadDim>;
  constexpr int kVectors = (HeadDim + 8) / kGroupVectorValues;
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<SlotUnpackStorage<HeadDim>*>(shared);
  TileLocation tile(view);
  bool is_key = view.role == Role::kKey;
  int lane = threadIdx.x % 32, first_atom = threadIdx.x / 32 * kAtoms;
  for (int i = threadIdx.x; i < kTileTokens * kVectors; i += kGroupThreads)
    reinterpret_cast<uint4*>(s.element)[i] = make_uint4(0, 0, 0, 0);
  if (int i = threadIdx.x; i < HeadDim) {
    s.channel[i] = view.channel_order[tile.head * HeadDim + i];
    s.of_channel[i] = scale_value(view.channel_scale[tile.head * HeadDim + i]);
  }
  if (int p = threadIdx.x; p < kTileTokens) {
    s.token[p] = view.token_order[tile.index * kTileTokens + p];
    s.of_token[p] = scale_value(view.token_scales(tile.block)[scale_index(p)]);
  }
  __syncthreads();
  uint32_t const* values = tile.block + SlotTile::first_value_row<Codec>(HeadDim) * kLanes + lane;
  uint32_t const* bitmap = tile.block + SlotTile::metadata_rows(HeadDim) * kLanes + lane;
  auto word_of = [&](int i) { return __ldg(bitmap + i * kLanes); };
#pragma unroll 2
  for (int atom = first_atom; atom < first_atom + kAtoms; ++atom) {
    uint32_t bits = word_of(atom / 4) >> SlotTile::bitmap_bit<Codec>(kAtomSlots * (atom % 4));
    int rank = first_rank<Codec, HeadDim>(atom, word_of);
    uint32_t metadata[2];  // of groups 0 to 3 of the atom, and of 4 to 7: see pack_slots.cu
#pragma unroll
    for (int half = 0; half < 2; ++half)
      metadata[half] = __ldg(tile.block + atom / 2 * kLanes + lane / 4 * 4 + 2 * (atom % 2) + half);
    uint32_t codes[kAtomSlots];  // all are under way before the first is used
#pragma unroll
    for (int slot = 0; slot < kAtomSlots; ++slot) {
      bool is_stored = bits >> SlotTile::bitmap_bit<Codec>(slot) & 1;
      codes[slot] = is_stored ? Packed::extract(__ldg(values + Packed::value_row(0, rank) * kLanes), 0, rank) : 0;
      rank += is_stored;
    }
#pragma unroll
    for (int slot = 0; slot < kAtomSlots; ++slot) {
      int r = slot / kKept, first_bit = 4 * (lane % 4) + 16 * (r % 2) + 2 * (slot % kKept);
      RolePlace<HeadDim> place(is_key, lane, SlotTile::kAtomGroups * atom + r);
      int at = metadata[r / 2] >> first_bit & 3, token = place.token_of(at), channel = place.channel_of(at);
      float x = scaled_up(Codec::number(codes[slot]), s.of_token[token], s.of_channel[channel], view.dtype);
      if (bits >> SlotTile::bitmap_bit<Codec>(slot) & 1)
        s.element[s.token[token]][s.channel[channel]] = rounded_bits(x, view.dtype);
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
                   sizeof(SlotUnpackStorage<head_dim()>), stream, "launch of decompress", view,
                   static_cast<uint16_t*>(out));
    });
  });
}

}  // namespace cute_kernels::compress
