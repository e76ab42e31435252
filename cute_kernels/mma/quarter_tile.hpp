// A quarter of a tile as one of four warps decodes it: 16 tokens of keys, all channels; of values, a quarter of the
// channels, all tokens.
#pragma once

#include "cute_kernels/mma/decoder.hpp"

namespace cute_kernels::mma {

// kAtOnce: how values of the quarters before are counted, as for the decoder.
template <class TileFormat, class Codec, int kHeadDim, bool kAtOnce = true>
class QuarterTile {
 public:
  static constexpr int kParts = 4;
  static constexpr int kWords = TileFormat::bitmap_rows(kHeadDim) / kParts;
  static constexpr int kStepWords = kWords < 2 ? kWords : 2;  // decoded side by side
  static constexpr int kSteps = kWords / kStepWords;
  // A word has A fragments of so many atoms side by side along K, 64 columns: channels of keys, all tokens of values.
  static constexpr int kWordAtoms = TileFormat::kWordElements / 8;

  // block: shared-memory address.
  CUTE_DEVICE QuarterTile(uint32_t block, int part)
      : column_(block + 4 * (threadIdx.x % 32) + part * kWords * format::kRowBytes),
        at_(Decoder::template first<kHeadDim, kParts, kAtOnce>(block + 4 * (threadIdx.x % 32), part)) {}

  // A fragments of a step's words, 4 registers an atom; steps in order.
  template <class Registers>
  CUTE_DEVICE void decode(int step, Registers& registers /* (4 * kWordAtoms * kStepWords) */) {
    uint32_t first = word(step * kStepWords);
    if constexpr (kStepWords == 2)
      Decoder::decode64(first, word(2 * step + 1), at_, registers);
    else
      Decoder::decode32(first, at_, registers);
  }

  // A bitmap word, and of narrow codecs two of its atoms, from an even one on; in order.
  CUTE_DEVICE uint32_t word(int index) const { return ptx::load_shared_u32(column_ + index * format::kRowBytes); }
  template <class Registers>
  CUTE_DEVICE void decode_atoms(uint32_t word, int atom, Registers& registers /* (8) */) {
    Decoder::decode16(word, atom, at_, registers);
  }

 private:
  using Decoder = mma::Decoder<TileFormat, Codec>;
  uint32_t column_;
  typename Decoder::Cursor at_;
};

}  // namespace cute_kernels::mma
