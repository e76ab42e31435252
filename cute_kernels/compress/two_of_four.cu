// Tiles of exactly two of four, from dense rows and back; one CTA a tile. A warp takes whole atoms of the tile, and a lane
// its groups of them, as the MMA kernels do.
#include "cute_kernels/compress/encode.hpp"
#include "cute_kernels/compress/group_tile.hpp"

namespace cute_kernels::compress {
namespace {

using Tile = TwoOfFourTile;

constexpr int kThreads = kGroupThreads, kVectorValues = kGroupVectorValues;

template <int HeadDim>
using Dense = DenseRows<HeadDim>;
template <int HeadDim, bool kHasScales>
struct PackStorage : Dense<HeadDim> {
  float per_channel[kHasScales ? HeadDim : 1], per_token[kHasScales ? kTileTokens : 1];  // by position
  uint32_t largest[kHasScales ? kTileTokens : 1];  // of tokens: bits of floats that are not negative
};

__device__ uint32_t byte_of(uint32_t word, uint32_t index) { return ptx::permute_bytes(word, 0, 0x4440 | index); }

// Elements of four, which are two in a word, in one word: those that metadata names. -0 counts as zero.
__device__ uint32_t pick_pair(uint32_t first, uint32_t second, uint32_t two) {
  uint32_t bytes = 0x1010 + (two & 3) * 0x0022 + (two >> 2) * 0x2200;
  uint32_t pair = ptx::permute_bytes(first, second, bytes);
  if (!(pair & 0x7fff)) pair &= 0xffff0000;
  if (!(pair & 0x7fff0000)) pair &= 0xffff;
  return pair;
}

// refused: counts values that the codec cannot store. lost: counts nonzeros beyond two of four; null: nobody asks.
template <Role kRole, int HeadDim, class Codec>
__global__ void __launch_bounds__(kThreads, 2)
    pack_pairs_kernel(DenseView x, bool vectors, SparseView view, int64_t* refused, int64_t* lost) {
  constexpr int kAtoms = kWarpAtoms<HeadDim>, kAlongK = Tile::atoms_along_k(kRole, HeadDim);
  constexpr bool kIsKey = kRole == Role::kKey;
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<PackStorage<HeadDim, Codec::kHasScales>*>(shared);
  TileLocation tile(view);
  int lane = threadIdx.x % 32, first_atom = threadIdx.x / 32 * kAtoms;
  start_rows(s, x, tile, vectors);
  if (int i = threadIdx.x; i < HeadDim) {
    s.channel[i] = view.channel_order[tile.head * HeadDim + i];
    if constexpr (Codec::kHasScales) s.per_channel[i] = 1 / scale_value(view.channel_scale[tile.head * HeadDim + i]);
  }
  if constexpr (Codec::kHasScales) {
    if (threadIdx.x < kTileTokens) s.largest[threadIdx.x] = 0;
  }
  cute::cp_async_wait<0>();
  __syncthreads();

  uint32_t pairs[kAtoms][Tile::kAtomGroups];  // of 16 bits
  uint32_t kept[kAtoms] = {};                 // metadata of an atom's groups, 4 bits each
  // Of values and the reciprocals of their channels' scales.
  float products[kAtoms][Tile::kAtomGroups][Tile::kKept];
  uint32_t nan = nan_key(view.dtype), infinity = nan - 1;
  int out_of_range = 0, left_out = 0;
  float most[2] = {};  // of the lane's rows of keys, which an atom's groups have in turn: largest product
#pragma unroll
  for (int a = 0; a < kAtoms; ++a) {
    uint32_t metadata[2] = {};  // of groups 0 to 3 of the atom, and of 4 to 7
#pragma unroll
    for (int r = 0; r < Tile::kAtomGroups; ++r) {
      GroupPlace<kRole, HeadDim> place(lane, Tile::kAtomGroups * (first_atom + a) + r);
      uint32_t bits[Tile::kGroup], keys[Tile::kGroup];
      uint32_t channels = kIsKey ? *reinterpret_cast<uint32_t const*>(s.channel + place.channel) : 0;
#pragma unroll
      for (int i = 0; i < Tile::kGroup; ++i) {
        bits[i] = s.element[place.token_of(i)][kIsKey ? byte_of(channels, i) : s.channel[place.channel]];
        keys[i] = magnitude_key(static_cast<uint16_t>(bits[i]), nan);
      }
      TwoLargest found(keys);
      uint32_t pair = pick_pair(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, found.two);
      kept[a] |= found.two << (Tile::kMetadataBits * r);
      metadata[r / 2] |= found.two << (4 * (lane % 4) + 16 * (r % 2));
      if (lost) {
        int nonzero = 0;
#pragma unroll
        for (uint32_t key : keys) nonzero += key != 0;
        left_out += max(0, nonzero - Tile::kKept);
      }
      if constexpr (!Codec::kHasScales) {
        pairs[a][r] = pair;
      } else {
        bool all_finite = found.largest < infinity;
#pragma unroll
        for (int i = 0; i < Tile::kKept; ++i) {
          int element = found.two >> (2 * i) & 3;
          float value = to_float(static_cast<uint16_t>(pair >> (16 * i)), view.dtype);
          float product = value * s.per_channel[place.channel_of(element)], magnitude = fabsf(product);
          if (!all_finite) {
            bool is_nan = value != value, is_infinite = fabsf(value) == INFINITY;
            out_of_range += is_infinite || (is_nan && !Codec::kHasNan);
            if (is_nan || is_infinite) magnitude = 0;
          }
          products[a][r][i] = product;
          if constexpr (kIsKey)
            most[r % 2] = fmaxf(most[r % 2], magnitude);
          else
            atomicMax(&s.largest[place.token_of(element)], __float_as_uint(magnitude));
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      metadata[half] |= __shfl_xor_sync(~0u, metadata[half], 1);
      metadata[half] |= __shfl_xor_sync(~0u, metadata[half], 2);
    }
    static_assert(kAlongK % 2 == 0);
    int atom = first_atom + a;
    if (lane % 4 / 2 == atom % 2) tile.block[atom / 2 * kLanes + lane] = lane % 2 ? metadata[1] : metadata[0];
  }
  if (lost) add_to(lost, left_out);
  if constexpr (Codec::kHasScales) {
    if constexpr (kIsKey) raise_largest<HeadDim>(s.largest, first_atom, lane, most);
    add_to(refused, out_of_range);
    __syncthreads();
    if (threadIdx.x < kTileTokens) {
      uint16_t scale = token_scale(__uint_as_float(s.largest[threadIdx.x]), Codec::kLargest);
      s.per_token[threadIdx.x] = 1 / scale_value(scale);
      reinterpret_cast<uint16_t*>(tile.block + Tile::metadata_rows(HeadDim) * kLanes)[scale_index(threadIdx.x)] = scale;
    }
    __syncthreads();
  }

  constexpr int kRows = Tile::kAtomGroups * Tile::kKept * Codec::kValueBits / 32;  // of an atom
  uint32_t* values = tile.block + (Tile::first_value_row<Codec>(HeadDim) + first_atom * kRows) * kLanes + lane;
#pragma unroll
  for (int a = 0; a < kAtoms; ++a) {
    uint32_t words[kRows];
    if constexpr (!Codec::kHasScales) {
#pragma unroll
      for (int r = 0; r < Tile::kAtomGroups; ++r) words[r] = pairs[a][r];
    } else {
      float scaled[kRows][32 / Codec::kValueBits];
#pragma unroll
      for (int r = 0; r < Tile::kAtomGroups; ++r) {
        GroupPlace<kRole, HeadDim> place(lane, Tile::kAtomGroups * (first_atom + a) + r);
#pragma unroll
        for (int i = 0; i < Tile::kKept; ++i) {
          int element = kept[a] >> (Tile::kMetadataBits * r + 2 * i) & 3;
          scaled[Tile::value_row<Codec>(r)][Tile::first_bit<Codec>(r, i) / Codec::kValueBits] =
              scaled_by_token(products[a][r][i], s.per_token[place.token_of(element)]);
        }
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) words[row] = encode_word<Codec>(scaled[row]);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) values[(a * kRows + row) * kLanes] = words[row];
  }
}

template <Role kRole, int HeadDim, class Codec>
__global__ void __launch_bounds__(kThreads, 2) unpack_pairs_kernel(SparseView view, uint16_t* out) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<Dense<HeadDim>*>(shared);
  constexpr int kAtoms = kWarpAtoms<HeadDim>, kVectors = (HeadDim + 8) / kVectorValues;
  TileLocation tile(view);
  int lane = threadIdx.x % 32, first_group = threadIdx.x / 32 * kAtoms * Tile::kAtomGroups;
  for (int i = threadIdx.x; i < kTileTokens * kVectors; i += kThreads)
    reinterpret_cast<uint4*>(s.element)[i] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < HeadDim; i += kThreads) s.channel[i] = view.channel_order[tile.head * HeadDim + i];
  __syncthreads();
  uint32_t const* values = tile.block + Tile::first_value_row<Codec>(HeadDim) * kLanes + lane;
  uint8_t const* token_order = view.token_order + tile.index * kTileTokens;
#pragma unroll 4
  for (int group = first_group; group < first_group + kAtoms * Tile::kAtomGroups; ++group) {
    GroupPlace<kRole, HeadDim> place(lane, group);
    int atom = group / Tile::kAtomGroups, r = group % Tile::kAtomGroups;  // as in the kernel above
    int metadata_lane = lane / 4 * 4 + 2 * (atom % 2) + r / 2;
    uint32_t kept = __ldg(tile.block + atom / 2 * kLanes + metadata_lane) >> (4 * (lane % 4) + 16 * (r % 2));
    uint32_t word = __ldg(values + Tile::value_row<Codec>(group) * kLanes);
#pragma unroll
    for (int i = 0; i < Tile::kKept; ++i) {
      int element = kept >> (2 * i) & 3, token = place.token_of(element), channel = place.channel_of(element);
      uint32_t code = word >> Tile::first_bit<Codec>(group, i) & ((1u << Codec::kValueBits) - 1);
      uint16_t bits = static_cast<uint16_t>(code);
      if constexpr (Codec::kHasScales) {
        float of_token = scale_value(view.token_scales(tile.block)[scale_index(token)]);
        float of_channel = scale_value(view.channel_scale[tile.head * HeadDim + channel]);
        bits = rounded_bits(scaled_up(Codec::number(code), of_token, of_channel, view.dtype), view.dtype);
      }
      s.element[token_order[token]][s.channel[channel]] = bits;
    }
  }
  __syncthreads();
  store_rows<HeadDim>(s, tile, view, out);
}

}  // namespace

void pack_two_of_four(DenseView const& x, SparseView const& view, int64_t* refused, int64_t* lost,
                      cudaStream_t stream) {
  check_tile_format(view, Tile::kId, "pack_two_of_four");
  visit_packed_codec(view.codec, [&](auto codec) {
    using Codec = decltype(codec);
    visit_shape(view, [&](auto role, auto head_dim) {
      launch_tiles(pack_pairs_kernel<role(), head_dim(), Codec>, view.tiles(), kThreads,
                   sizeof(PackStorage<head_dim(), Codec::kHasScales>), stream, "launch of pack_two_of_four", x,
                   x.has_vectors(), view, refused, lost);
    });
  });
}

void unpack_two_of_four(SparseView const& view, void* out, cudaStream_t stream) {
  check_tile_format(view, Tile::kId, "unpack_two_of_four");
  visit_packed_codec(view.codec, [&](auto codec) {
    visit_shape(view, [&](auto role, auto head_dim) {
      launch_tiles(unpack_pairs_kernel<role(), head_dim(), decltype(codec)>, view.tiles(), kThreads,
                   sizeof(Dense<head_dim()>), stream, "launch of decompress", view, static_cast<uint16_t*>(out));
    });
  });
}

}  // namespace cute_kernels::compress
