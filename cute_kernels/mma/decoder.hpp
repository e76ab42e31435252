// The seam between a stored tile and the MMA: a decoder turns a lane's part of a block into A fragments.
//
// Decoder<TileFormat, Codec> has
//   Cursor                                   where a lane is in its streams
//   first<kHeadDim, kParts>(column, part)    the cursor of one of kParts equal parts of a lane's elements; column:
//                                            shared-memory address of the lane's first word in the block
//   decode32(word, cursor, registers)        the elements of one bitmap word, 32, into 16 registers of two elements
//   decode64(word0, word1, cursor, registers)
//                                            those of two words, into 32 registers
// and may read format::kRowsBehind rows behind the block.
#pragma once

namespace cute_kernels::mma {

template <class TileFormat, class Codec>
struct Decoder {
  static_assert(sizeof(Codec) == 0, "no decoder for this tile format and codec");
};

}  // namespace cute_kernels::mma

#include "cute_kernels/mma/bitmap16_decoder.hpp"
