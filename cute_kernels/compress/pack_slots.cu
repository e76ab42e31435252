// Blocks of at most two of four, from dense rows and masks; one CTA a tile. A warp takes whole atoms, and a lane its slots of
// them, as the MMA kernels do.
#include "cute_kernels/compress/load_tile.hpp"
#include "cute_kernels/compress/slots.hpp"

namespace cute_kernels::compress {
namespace {

template <int HeadDim>
struct SlotPackStorage : DenseRows<HeadDim> {
  uint32_t masks[kTileTokens][kMaskWords<HeadDim>];
  uint8_t token[kTileTokens];                          // by position
  float per_channel[HeadDim], per_token[kTileTokens];  // by position
  uint32_t bitmap[SlotTile::bitmap_rows(HeadDim)][kLanes];
  uint2 atoms[SlotTile::lane_slots(HeadDim) / kAtomSlots][kLanes];   // codes of an atom's slots, a byte each
  alignas(16) uint8_t codes[SlotTile::lane_slots(HeadDim)][kLanes];  // those that are stored, by rank
};

// Streams longer than `most` lose the values of least magnitude, of equal ones the later: a lane a stream. With all warps.
template <class Codec, int HeadDim>
__device__ void trim(SlotPackStorage<HeadDim>& s, int most, int64_t* dropped) {
  constexpr int kSlots = SlotTile::lane_slots(HeadDim);
  int lane = threadIdx.x % 32, excess = -most;
#pragma unroll
  for (int i = 0; i < SlotTile::bitmap_rows(HeadDim); ++i) excess += __popc(s.bitmap[i][lane]);
  excess = max(0, excess);
  if (!__any_sync(~0u, excess > 0)) return;  // the same in all warps
  __syncthreads();
  if (threadIdx.x < 32) {
#pragma unroll 1
    for (int i = 0; i < excess; ++i) {
      uint32_t least = ~0u;
      int at = 0;
#pragma unroll 1
      for (int slot = 0; slot < kSlots; ++slot) {
        if (!(s.bitmap[SlotTile::bitmap_word(slot)][lane] >> SlotTile::bitmap_bit<Codec>(slot) & 1)) continue;
        uint2 codes = s.atoms[slot / kAtomSlots][lane];
        uint32_t magnitude = Codec::magnitude((slot % 8 < 4 ? codes.x : codes.y) >> 8 * (slot % 4) & 0xff);
        if (magnitude <= least) least = magnitude, at = slot;
      }
      s.bitmap[SlotTile::bitmap_word(at)][lane] &= ~(1u << SlotTile::bitmap_bit<Codec>(at));
    }
    add_to(dropped, lane == 0);
    add_to(dropped + 1, excess);
  }
  __syncthreads();
}

template <int HeadDim, class Codec>
__global__ void __launch_bounds__(kGroupThreads)
    pack_slots_kernel(DenseView x, bool vectors, uint32_t const* masks, uint16_t const* token_scale,
                      int64_t const* totals, int64_t capacity, SparseView view, int32_t const* tile_rows,
                      int64_t* dropped) {
  using Packed = SlotTile::Packed<Codec>;
  constexpr int kAtoms = kWarpAtoms<HeadDim>, kWords = kMaskWords<HeadDim>;
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<SlotPackStorage<HeadDim>*>(shared);
  if (totals && *totals > capacity) return;
  TileLocation tile(view);
  bool is_key = view.role == Role::kKey;
  int lane = threadIdx.x % 32, first_atom = threadIdx.x / 32 * kAtoms;
  int value_rows = (tile_rows ? tile_rows[tile.index] : tile.rows) - SlotTile::first_value_row<Codec>(HeadDim);
  load_rows<HeadDim>(s, x, tile.head, tile.first_token, tile.tokens, vectors);
  for (int i = threadIdx.x; i < kTileTokens * kWords; i += kGroupThreads)
    s.masks[0][i] = masks[tile.index * kTileTokens * kWords + i];
  for (int i = threadIdx.x; i < SlotTile::bitmap_rows(HeadDim) * kLanes; i += kGroupThreads) s.bitmap[0][i] = 0;
  for (int i = threadIdx.x; i < min(SlotTile::lane_slots(HeadDim), value_rows * Codec::kWordValues) * kLanes / 16;
       i += kGroupThreads)
    reinterpret_cast<uint4*>(s.codes)[i] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < HeadDim; i += kGroupThreads) {
    s.channel[i] = view.channel_order[tile.head * HeadDim + i];
    s.per_channel[i] = 1 / scale_value(view.channel_scale[tile.head * HeadDim + i]);
  }
  for (int p = threadIdx.x; p < kTileTokens; p += kGroupThreads) {
    s.token[p] = view.token_order[tile.index * kTileTokens + p];
    uint16_t scale = token_scale[tile.index * kTileTokens + s.token[p]];
    s.per_token[p] = 1 / scale_value(scale);
    reinterpret_cast<uint16_t*>(tile.block + SlotTile::scale_row(HeadDim) * kLanes)[scale_index(p)] = scale;
  }
  __syncthreads();

  uint32_t nan = nan_key(view.dtype);
#pragma unroll 1
  for (int atom = first_atom; atom < first_atom + kAtoms; ++atom) {
    uint32_t metadata[2] = {}, bits = 0;  // metadata of groups 0 to 3 of the atom, and of 4 to 7
    float scaled[kAtomSlots];
#pragma unroll
    for (int r = 0; r < SlotTile::kAtomGroups; ++r) {
      RolePlace<HeadDim> place(is_key, lane, SlotTile::kAtomGroups * atom + r);
      uint32_t element[kGroup], keys[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        int token = s.token[place.token_of(i)], position = place.channel_of(i), channel = s.channel[position];
        uint32_t mask = is_key ? s.masks[token][position / 128 * kGroup + i] >> position / kGroup % 32
                               : s.masks[token][channel / 32] >> channel % 32;
        element[i] = s.element[token][channel];
        keys[i] = mask & 1 ? magnitude_key(static_cast<uint16_t>(element[i]), nan) : 0;
      }
      uint32_t two = two_largest(keys);
      metadata[r / 2] |= two << (4 * (lane % 4) + 16 * (r % 2));
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        int at = two >> (2 * i) & 3, slot = kKept * r + i;
        uint32_t value = at & 2 ? (at & 1 ? element[3] : element[2]) : (at & 1 ? element[1] : element[0]);
        uint32_t key = at & 2 ? (at & 1 ? keys[3] : keys[2]) : (at & 1 ? keys[1] : keys[0]);
        scaled[slot] = scaled_down(from_half_bits(static_cast<uint16_t>(value), view.dtype),
                                   s.per_channel[place.channel_of(at)], s.per_token[place.token_of(at)]);
        bits |= key ? 1u << SlotTile::bitmap_bit<Codec>(slot) : 0;
      }
    }
    uint32_t codes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float const four[] = {scaled[4 * i], scaled[4 * i + 1], scaled[4 * i + 2], scaled[4 * i + 3]};
      codes[i] = encode_four<Codec>(four);
    }
    s.atoms[atom][lane] = make_uint2(codes[0], codes[1]);
    // An atom's bits lie as those of the word's first one, so many further on.
    atomicOr(&s.bitmap[atom / 4][lane], bits << SlotTile::bitmap_bit<Codec>(kAtomSlots * (atom % 4)));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      metadata[half] |= __shfl_xor_sync(~0u, metadata[half], 1);
      metadata[half] |= __shfl_xor_sync(~0u, metadata[half], 2);
    }
    if (lane % 4 / 2 == atom % 2) tile.block[atom / 2 * kLanes + lane] = lane % 2 ? metadata[1] : metadata[0];
  }
  __syncthreads();
  if (tile_rows) trim<Codec>(s, Packed::most_values(value_rows), dropped);
  for (int i = threadIdx.x; i < SlotTile::bitmap_rows(HeadDim) * kLanes; i += kGroupThreads)
    tile.block[SlotTile::metadata_rows(HeadDim) * kLanes + i] = s.bitmap[0][i];
#pragma unroll 1
  for (int atom = first_atom; atom < first_atom + kAtoms; ++atom) {
    uint32_t bits = s.bitmap[atom / 4][lane] >> SlotTile::bitmap_bit<Codec>(kAtomSlots * (atom % 4));
    uint2 codes = s.atoms[atom][lane];
    int rank = first_rank<Codec>(atom, [&](int i) { return s.bitmap[i][lane]; });
#pragma unroll
    for (int slot = 0; slot < kAtomSlots; ++slot)
      if (bits >> SlotTile::bitmap_bit<Codec>(slot) & 1)
        s.codes[rank++][lane] = static_cast<uint8_t>((slot < 4 ? codes.x : codes.y) >> 8 * (slot % 4));
  }
  __syncthreads();
  uint32_t* values = tile.block + SlotTile::first_value_row<Codec>(HeadDim) * kLanes;
  for (int row = threadIdx.x / 32; row < value_rows; row += kGroupWarps) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < Packed::kWordValues; ++i)
      word |= uint32_t{s.codes[row * Packed::kWordValues + i][lane]} << Packed::kValueBits * i;
    values[row * kLanes + lane] = word;
  }
}

}  // namespace

void pack_slots(DenseView const& x, uint32_t const* masks, uint16_t const* token_scale, int64_t const* totals,
                int64_t capacity, SparseView const& view, int32_t const* tile_rows, int64_t* dropped,
                cudaStream_t stream) {
  check_tile_format(view, SlotTile::kId, "pack_slots");
  visit_narrow_codec(view.codec, [&](auto codec) {
    visit_head_dim(view.padded_head_dim, [&](auto head_dim) {
      launch_tiles(pack_slots_kernel<head_dim(), decltype(codec)>, view.tiles(), kGroupThreads,
                   sizeof(SlotPackStorage<head_dim()>), stream, "launch of pack_slots", x, x.has_vectors(), masks,
                   token_scale, totals, capacity, view, tile_rows, dropped);
    });
  });
}

}  // namespace cute_kernels::compress
