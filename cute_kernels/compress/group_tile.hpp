// What packing and unpacking of tiles of two of four share: dense rows in shared memory, and a lane's groups of them.
#pragma once

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

// The two largest of four, ties to the first: their indices in order, as metadata has them.
__device__ inline uint32_t two_largest(uint32_t const (&keys)[TwoOfFourGroups::kGroup]) {
  uint32_t best = keys[1] > keys[0], next = 1 - best;
  uint32_t best_key = max(keys[0], keys[1]), next_key = min(keys[0], keys[1]);
#pragma unroll
  for (uint32_t i = 2; i < TwoOfFourGroups::kGroup; ++i) {
    bool above_best = keys[i] > best_key, above_next = keys[i] > next_key;
    next = above_best ? best : above_next ? i : next;
    next_key = above_best ? best_key : above_next ? keys[i] : next_key;
    best = above_best ? i : best;
    best_key = above_best ? keys[i] : best_key;
  }
  return min(best, next) | max(best, next) << 2;
}

__device__ inline void add_to(int64_t* total, int count) {
  count = __reduce_add_sync(~0u, count);
  if (count && threadIdx.x % 32 == 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(total), static_cast<unsigned long long>(count));
}

// Rows of the tile's tokens, zeros beyond what exists.
template <int HeadDim>
__device__ void load_rows(DenseRows<HeadDim>& s, DenseView const& x, unsigned head, int64_t first_token, int tokens,
                          bool vectors) {
  constexpr int kVectors = HeadDim / kGroupVectorValues;  // of a token
#pragma unroll 4
  for (int i = threadIdx.x; i < kTileTokens * kVectors; i += kGroupThreads) {
    int token = i / kVectors, channel = i % kVectors * kGroupVectorValues;
    alignas(16) uint16_t values[kGroupVectorValues] = {};
    if (token < tokens && channel < x.head_dim) {
      uint16_t const* from = x.row(head, first_token + token) + channel;
      if (vectors) {
        *reinterpret_cast<uint4*>(values) = *reinterpret_cast<uint4 const*>(from);
      } else {
#pragma unroll
        for (int j = 0; j < kGroupVectorValues; ++j) values[j] = from[j];
      }
    }
    *reinterpret_cast<uint4*>(&s.element[token][channel]) = *reinterpret_cast<uint4 const*>(values);
  }
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
