// What packing and unpacking of tiles of two of four share: dense rows in shared memory, and a lane's groups of them.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/pointer.hpp>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/compress/tile_kernel.hpp"
#include "cute_kernels/format/tile/two_of_four.hpp"

namespace cute_kernels::compress {

using namespace format;

constexpr int kGroupWarps = 8, kGroupThreads = 32 * kGroupWarps, kGroupVectorValues = 8;

// Atoms of a tile that a warp takes.
template <int HeadDim>
constexpr int kWarpAtoms = TwoOfFourGroups::lane_groups(HeadDim) / TwoOfFourGroups::kAtomGroups / kGroupWarps;

template <int HeadDim>
struct DenseRows {
  alignas(16) uint16_t element[kTileTokens][HeadDim + 8];  // rows in different banks
  uint8_t channel[HeadDim];                                // by position
};

// Where a lane's group is: a row of A and four columns of it.
template <Role kRole, int HeadDim>
struct GroupPlace {
  int token, channel;  // positions of its first element

  __device__ GroupPlace(int lane, int group) {
    int first = TwoOfFourGroups::element_layout<kRole, HeadDim>()(lane, TwoOfFourGroups::kGroup * group);
    token = first / HeadDim, channel = first % HeadDim;
  }
  __device__ int token_of(int i) const { return kRole == Role::kKey ? token : token + i; }
  __device__ int channel_of(int i) const { return kRole == Role::kKey ? channel + i : channel; }
};

// As from_half_bits. No branch, which would keep apart what could be loaded side by side.
__device__ inline float to_float(uint16_t bits, DType dtype) {
  uint32_t mask = dtype == DType::kBFloat16 ? ~0u : 0;
  return bits_float(ptx::blend(float_bits(float(half_t::bitcast(bits))), uint32_t{bits} << 16, ~mask));
}

// The two largest of four keys, which are below 2^30, ties to the first.
struct TwoLargest {
  uint32_t two;      // their indices in order, as metadata has them
  uint32_t largest;  // key

  __device__ TwoLargest(uint32_t const (&keys)[TwoOfFourGroups::kGroup]) {
    uint32_t ranked[TwoOfFourGroups::kGroup];  // no two are equal
#pragma unroll
    for (uint32_t i = 0; i < TwoOfFourGroups::kGroup; ++i) ranked[i] = 4 * keys[i] + 3 - i;
    uint32_t a = max(ranked[0], ranked[1]), b = max(ranked[2], ranked[3]);
    uint32_t best = max(a, b), next = max(min(a, b), max(min(ranked[0], ranked[1]), min(ranked[2], ranked[3])));
    uint32_t i = ~best & 3, j = ~next & 3;
    two = min(i, j) | max(i, j) << 2;
    largest = best / 4;
  }
};

__device__ inline void add_to(int64_t* total, int count) {
  count = __reduce_add_sync(~0u, count);
  if (count && threadIdx.x % 32 == 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(total), static_cast<unsigned long long>(count));
}

// Of keys: raises the `largest` of tokens, by position, to the most that lanes found in the two rows of a warp's atoms.
template <int HeadDim>
__device__ void raise_largest(uint32_t* largest, int first_atom, int lane, float (&most)[2]) {
  static_assert(TwoOfFourGroups::atoms_along_k(Role::kKey, HeadDim) % kWarpAtoms<HeadDim> == 0,
                "they have the same rows");
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    most[row] = fmaxf(most[row], __shfl_xor_sync(~0u, most[row], 1));
    most[row] = fmaxf(most[row], __shfl_xor_sync(~0u, most[row], 2));
    GroupPlace<Role::kKey, HeadDim> place(lane, TwoOfFourGroups::kAtomGroups * first_atom + row);
    if (lane % 4 == 0) atomicMax(&largest[place.token], __float_as_uint(most[row]));
  }
}

// Starts to copy the rows of the tile's tokens to shared memory, with zeros for tokens and channels that are not there.
template <int HeadDim>
__device__ void start_rows(DenseRows<HeadDim>& s, DenseView const& x, TileLocation const& tile, bool vectors) {
  uint16_t const* from = x.row(tile.head, tile.first_token);
  if (!vectors) {
    for (int i = threadIdx.x; i < kTileTokens * HeadDim; i += kGroupThreads) {
      int token = i / HeadDim, channel = i % HeadDim;
      bool exists = token < tile.tokens && channel < x.head_dim;
      s.element[token][channel] = exists ? from[token * x.stride_token + channel] : uint16_t{0};
    }
    return;
  }
  constexpr int kVectors = HeadDim / kGroupVectorValues, kRows = kGroupThreads / kVectors;  // at a time
  int row = threadIdx.x / kVectors, channel = threadIdx.x % kVectors * kGroupVectorValues;
  int tokens = channel < x.head_dim ? tile.tokens : 0;  // that this thread's column of vectors has
  from += row * x.stride_token + channel;
#pragma unroll
  for (int t = 0; t < kTileTokens; t += kRows) {
    ptx::cp_async_16(cute::cast_smem_ptr_to_uint(&s.element[row + t][channel]), from, row + t < tokens ? 16 : 0);
    from += kRows * x.stride_token;
  }
  cute::cp_async_fence();
}

// To the dense tensor.
template <int HeadDim>
__device__ void store_rows(DenseRows<HeadDim> const& s, TileLocation const& tile, SparseView const& view,
                           uint16_t* out) {
  int vectors = view.head_dim / kGroupVectorValues;  // of a token
  uint16_t* to = out + (tile.head * view.tokens + tile.first_token) * view.head_dim;
  for (int i = threadIdx.x; i < tile.tokens * vectors; i += kGroupThreads)
    reinterpret_cast<uint4*>(to)[i] =
        *reinterpret_cast<uint4 const*>(&s.element[i / vectors][i % vectors * kGroupVectorValues]);
}

}  // namespace cute_kernels::compress
