// Blocks of at most two of four, from dense rows and masks; one CTA a tile. A warp takes whole atoms, and a lane its slots of
// them, as the MMA kernels do.
#include "cute_kernels/compress/bits.hpp"
#include "cute_kernels/compress/encode.hpp"
#include "cute_kernels/compress/slots.hpp"

namespace cute_kernels::compress {
namespace {

struct Column {
  int channel;
  float per_channel;  // reciprocal of its scale
};

template <int HeadDim>
struct SlotPackStorage : DenseRows<HeadDim> {
  Column column[HeadDim];  // by position
  int row[kTileTokens];    // the same: of a token, where its elements begin
  alignas(16) uint32_t masks[kTileTokens][kMaskWords<HeadDim>];
  uint32_t tokens_kept[HeadDim][kTileTokens / 32];  // of values: by channel, a bit each by position
  uint8_t token[kTileTokens];                       // by position
  float per_token[kTileTokens];                     // the same
  uint32_t largest[kTileTokens];                    // the same: bits of floats that are not negative
  uint32_t bitmap[SlotTile::bitmap_rows(HeadDim)][kLanes];
  uint2 atoms[SlotTile::lane_slots(HeadDim) / kAtomSlots][kLanes];   // codes of an atom's slots, a byte each
  alignas(16) uint8_t codes[SlotTile::lane_slots(HeadDim)][kLanes];  // those that are stored, by rank
};

// From a token's mask, 4 bits a group: what is kept of the keys in groups `first`, `first` + 4, ...
__device__ uint32_t every_fourth_group(uint32_t const* mask, int first) {
  uint4 members = *reinterpret_cast<uint4 const*>(mask + first / 32 * kGroup);
  auto bits = [&](uint32_t word) { return word >> first % 32 & 0x11111111; };
  return bits(members.x) | bits(members.y) << 1 | bits(members.z) << 2 | bits(members.w) << 3;
}

// Where in a group of which these bits are set, two at most, its two candidates are: as `TwoLargest` would have them.
__device__ uint32_t candidates(uint32_t bits) {
  constexpr uint64_t kTwo = 0x000e'0dcc'0988'4444;  // 4 bits for each value of `bits`
  uint32_t half = bits < 8 ? static_cast<uint32_t>(kTwo) : static_cast<uint32_t>(kTwo >> 32);
  return half >> 4 * (bits % 8) & 15;
}

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

// CTAs of an SM, which bounds their registers.
template <Role kRole, int HeadDim>
constexpr int kResident = HeadDim == kMaxHeadDim ? 2
                          : kRole == Role::kKey  ? 5
                                                 : 4;

template <Role kRole, int HeadDim, class Codec>
__global__ void __launch_bounds__(kGroupThreads, kResident<kRole, HeadDim>)
    pack_slots_kernel(DenseView x, bool vectors, uint32_t const* masks, int64_t const* totals, int64_t capacity,
                      SparseView view, int32_t const* tile_rows, int64_t* dropped) {
  using Packed = SlotTile::Packed<Codec>;
  constexpr int kAtoms = kWarpAtoms<HeadDim>, kWords = kMaskWords<HeadDim>;
  constexpr bool kIsKey = kRole == Role::kKey;
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<SlotPackStorage<HeadDim>*>(shared);
  TileLocation tile(view);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_atom = warp * kAtoms;
  static_assert(kTileTokens * kWords / 4 <= 2 * kGroupThreads && HeadDim <= kGroupThreads);
#pragma unroll
  for (int i = threadIdx.x; i < kTileTokens * kWords / 4; i += kGroupThreads)
    ptx::cp_async_16(cute::cast_smem_ptr_to_uint(&s.masks[0][0] + 4 * i),
                     masks + tile.index * kTileTokens * kWords + 4 * i, 16);
  start_rows(s, x, tile, vectors);
  if (int i = threadIdx.x; i < HeadDim) {
    int64_t of_head = int64_t{tile.head} * HeadDim + i;
    s.column[i] = {view.channel_order[of_head], 1 / scale_value(view.channel_scale[of_head])};
  }
  if (int p = threadIdx.x; p < kTileTokens) {
    int token = view.token_order[tile.index * kTileTokens + p];
    s.token[p] = static_cast<uint8_t>(token);
    s.row[p] = token * (HeadDim + 8);
    s.largest[p] = 0;
  }
  constexpr int kCodeVectors = sizeof(s.codes) / sizeof(uint4);
#pragma unroll
  for (int i = threadIdx.x; i < kCodeVectors; i += kGroupThreads)
    reinterpret_cast<uint4*>(s.codes)[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = threadIdx.x; i < SlotTile::bitmap_rows(HeadDim) * kLanes; i += kGroupThreads) s.bitmap[0][i] = 0;
  if (totals && *totals > capacity) return;
  cute::cp_async_wait<0>();
  __syncthreads();
  if constexpr (!kIsKey) {
    for (int i = warp; i < HeadDim / 32 * (kTileTokens / 32); i += kGroupWarps) {
      int word = i / (kTileTokens / 32), half = i % (kTileTokens / 32);
      uint32_t bits = transpose_lanes(s.masks[s.token[32 * half + lane]][word], lane);
      s.tokens_kept[32 * word + lane][half] = bits;
    }
    __syncthreads();
  }

  uint32_t kept_of_row[2];  // of keys: 4 bits a group, of the lane's two rows in this warp's atoms
  if constexpr (kIsKey) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      GroupPlace<kRole, HeadDim> place(lane, SlotTile::kAtomGroups * first_atom + row);
      kept_of_row[row] = every_fourth_group(s.masks[s.token[place.token]], place.channel / kGroup);
    }
  }
  float products[kAtoms][kAtomSlots];  // of values and the reciprocals of their channels' scales
  uint32_t named[kAtoms] = {};         // metadata of an atom's groups, 4 bits each
  float most[2] = {};  // of the lane's rows of keys, which an atom's groups have in turn: largest product
#pragma unroll
  for (int a = 0; a < kAtoms; ++a) {
    int atom = first_atom + a;
    uint32_t metadata[2] = {}, atom_bits = 0;  // metadata of groups 0 to 3 of the atom, and of 4 to 7
#pragma unroll
    for (int r = 0; r < SlotTile::kAtomGroups; ++r) {
      GroupPlace<kRole, HeadDim> place(lane, SlotTile::kAtomGroups * atom + r);
      Column column;
      uint32_t bits;  // of what is kept
      if constexpr (kIsKey) {
        bits = kept_of_row[r % 2] >> 4 * (2 * a + r / 2) & 15;
      } else {
        column = s.column[place.channel];
        bits = s.tokens_kept[column.channel][place.token / 32] >> place.token % 32 & 15;
      }
      uint32_t two = candidates(bits);
      named[a] |= two << (SlotTile::kMetadataBits * r);
      metadata[r / 2] |= two << (4 * (lane % 4) + 16 * (r % 2));
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        int at = two >> (2 * i) & 3, slot = kKept * r + i;
        if constexpr (kIsKey) column = s.column[place.channel + at];
        bool kept = bits >> at & 1;
        atom_bits |= kept ? 1u << SlotTile::bitmap_bit<Codec>(slot) : 0;
        float value = to_float(s.element[0][s.row[place.token_of(at)] + column.channel], view.dtype);
        float product = value * column.per_channel;
        float magnitude = kept && fabsf(value) < INFINITY ? fabsf(product) : 0;
        products[a][slot] = product;
        if constexpr (kIsKey)
          most[r % 2] = fmaxf(most[r % 2], magnitude);
        else
          atomicMax(&s.largest[place.token_of(at)], __float_as_uint(magnitude));
      }
    }
    // An atom's bits lie as those of the word's first one, so many further on.
    atomicOr(&s.bitmap[atom / 4][lane], atom_bits << SlotTile::bitmap_bit<Codec>(kAtomSlots * (atom % 4)));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      metadata[half] |= __shfl_xor_sync(~0u, metadata[half], 1);
      metadata[half] |= __shfl_xor_sync(~0u, metadata[half], 2);
    }
    if (lane % 4 / 2 == atom % 2) tile.block[atom / 2 * kLanes + lane] = lane % 2 ? metadata[1] : metadata[0];
  }
  if constexpr (kIsKey) raise_largest<HeadDim>(s.largest, first_atom, lane, most);
  __syncthreads();
  if (int p = threadIdx.x; p < kTileTokens) {
    uint16_t scale = token_scale(__uint_as_float(s.largest[p]), Codec::kLargest);
    s.per_token[p] = 1 / scale_value(scale);
    reinterpret_cast<uint16_t*>(tile.block + SlotTile::scale_row(HeadDim) * kLanes)[scale_index(p)] = scale;
  }
  __syncthreads();
  uint2 codes[kAtoms];
#pragma unroll
  for (int a = 0; a < kAtoms; ++a) {
    float scaled[kAtomSlots];
#pragma unroll
    for (int slot = 0; slot < kAtomSlots; ++slot) {
      int r = slot / kKept, at = named[a] >> (SlotTile::kMetadataBits * r + 2 * (slot % kKept)) & 3;
      GroupPlace<kRole, HeadDim> place(lane, SlotTile::kAtomGroups * (first_atom + a) + r);
      scaled[slot] = scaled_by_token(products[a][slot], s.per_token[place.token_of(at)]);
    }
    codes[a].x = encode_four<Codec>({scaled[0], scaled[1], scaled[2], scaled[3]});
    codes[a].y = encode_four<Codec>({scaled[4], scaled[5], scaled[6], scaled[7]});
    if (tile_rows) s.atoms[first_atom + a][lane] = codes[a];
  }
  int value_rows = (tile_rows ? tile_rows[tile.index] : tile.rows) - SlotTile::first_value_row<Codec>(HeadDim);
  if (tile_rows) trim<Codec>(s, Packed::most_values(value_rows), dropped);
  for (int i = threadIdx.x; i < SlotTile::bitmap_rows(HeadDim) * kLanes; i += kGroupThreads)
    tile.block[SlotTile::metadata_rows(HeadDim) * kLanes + i] = s.bitmap[0][i];
#pragma unroll
  for (int a = 0; a < kAtoms; ++a) {
    int atom = first_atom + a;
    uint32_t bits = s.bitmap[atom / 4][lane] >> SlotTile::bitmap_bit<Codec>(kAtomSlots * (atom % 4));
    int rank = first_rank<Codec, HeadDim>(atom, [&](int i) { return s.bitmap[i][lane]; });
#pragma unroll
    for (int slot = 0; slot < kAtomSlots; ++slot) {
      if (bits >> SlotTile::bitmap_bit<Codec>(slot) & 1)
        s.codes[rank++][lane] = static_cast<uint8_t>((slot < 4 ? codes[a].x : codes[a].y) >> 8 * (slot % 4));
    }
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

void pack_slots(DenseView const& x, uint32_t const* masks, int64_t const* totals, int64_t capacity,
                SparseView const& view, int32_t const* tile_rows, int64_t* dropped, cudaStream_t stream) {
  check_tile_format(view, SlotTile::kId, "pack_slots");
  visit_narrow_codec(view.codec, [&](auto codec) {
    visit_shape(view, [&](auto role, auto head_dim) {
      launch_tiles(pack_slots_kernel<role(), head_dim(), decltype(codec)>, view.tiles(), kGroupThreads,
                   sizeof(SlotPackStorage<head_dim()>), stream, "launch of pack_slots", x, x.has_vectors(), masks,
                   totals, capacity, view, tile_rows, dropped);
    });
  });
}

}  // namespace cute_kernels::compress
