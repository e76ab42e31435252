// What kernels of the tile format of at most two of four share: masks, and a lane's groups and slots. Narrow codecs only.
#pragma once

#include <stdexcept>
#include <string>

#include "cute_kernels/compress/group_tile.hpp"
#include "cute_kernels/format/tile/two_of_four_bitmap.hpp"

namespace cute_kernels::compress {

using SlotTile = TwoOfFourBitmapTile;

constexpr int kGroup = SlotTile::kGroup, kKept = SlotTile::kKept, kAtomSlots = kKept * SlotTile::kAtomGroups;

// f(codec) with a narrow one.
template <class F>
void visit_narrow_codec(CodecId id, F&& f) {
  visit_codec(id, [&](auto codec) {
    if constexpr (decltype(codec)::kIsNarrow)
      f(codec);
    else
      throw std::runtime_error(std::string("there are no CUDA kernels for codec ") + codec.kName +
                               " in the tile format " + SlotTile::kName);
  });
}

// A token's mask. Of keys bit l of word 4 j + i is the channel at position 4 (32 j + l) + i, so that a group has one bit of
// four words; of values bit l of word e is channel 32 e + l.
template <int HeadDim>
constexpr int kMaskWords = HeadDim / 32 < kGroup ? kGroup : HeadDim / 32;

// GroupPlace of a role that is known when the kernel runs.
template <int HeadDim>
struct RolePlace {
  bool is_key;
  int token, channel;  // positions of its first element

  __device__ RolePlace(bool is_key, int lane, int group) : is_key(is_key) {
    auto take = [&](auto place) { token = place.token, channel = place.channel; };
    if (is_key)
      take(GroupPlace<Role::kKey, HeadDim>(lane, group));
    else
      take(GroupPlace<Role::kValue, HeadDim>(lane, group));
  }
  __device__ int token_of(int i) const { return is_key ? token : token + i; }
  __device__ int channel_of(int i) const { return is_key ? channel + i : channel; }
};

// Bits of a bitmap word that are of its first `atoms` atoms.
template <class Codec>
__device__ uint32_t bits_of_atoms(int atoms) {
  auto first = [](int atoms) constexpr {
    uint32_t bits = 0;
    for (int slot = 0; slot < kAtomSlots * atoms; ++slot) bits |= 1u << SlotTile::bitmap_bit<Codec>(slot);
    return bits;
  };
  constexpr uint32_t k1 = first(1), k2 = first(2), k3 = first(3);
  return atoms == 0 ? 0 : atoms == 1 ? k1 : atoms == 2 ? k2 : k3;
}

// The rank of an atom's first value in its lane's stream. word(i): of the lane.
template <class Codec, int HeadDim, class Word>
__device__ int first_rank(int atom, Word&& word) {
  int rank = __popc(word(atom / 4) & bits_of_atoms<Codec>(atom % 4));
#pragma unroll
  for (int i = 0; i < SlotTile::bitmap_rows(HeadDim) - 1; ++i) rank += i < atom / 4 ? __popc(word(i)) : 0;
  return rank;
}

}  // namespace cute_kernels::compress
