// The seam between a stored tile and the MMA: a decoder turns a lane's part of a block into A fragments.
//
// Decoder<TileFormat, Codec> has
//   Cursor                                   where a lane is in its streams
//   first<kHeadDim, kParts, kAtOnce>(column, part)
//                                            the cursor of one of kParts equal parts of a lane's elements; column:
//                                            shared-memory address of the lane's first word in the block
//   decode32(word, cursor, registers)        the elements of one bitmap word, 32, into 16 registers of two elements
//   decode64(word0, word1, cursor, registers)
//                                            those of two words, into 32 registers
//   kRowsBehind                              of a block, that it may read without using them
// Of a codec with scales the elements are the numbers of its codes.
// Of at most two of four the elements are slots (slot_decoder.hpp).
// Of exactly two of four a value has a place of its own: there is no cursor, and `load` takes an atom (pair_decoder.hpp).
#pragma once

namespace cute_kernels::mma {

template <class TileFormat, class Codec>
struct Decoder {
  static_assert(sizeof(Codec) == 0, "no decoder for this tile format and codec");
};

}  // namespace cute_kernels::mma

#include "cute_kernels/mma/bitmap16_decoder.hpp"
#include "cute_kernels/mma/narrow_decoder.hpp"
#include "cute_kernels/mma/pair_decoder.hpp"
#include "cute_kernels/mma/slot_decoder.hpp"
