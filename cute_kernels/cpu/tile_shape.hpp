// The shape of a tile as the kernels see it; layout.cpp checks it against the format.
#pragma once

#include <cstdint>
#include <type_traits>

namespace cute_kernels::cpu {
namespace {

constexpr int kTileLanes = 32;
constexpr int kTileRows = 8;  // lane = kTileColumns * row + column
constexpr int kTileColumns = 4;
constexpr int kTileStreams = 2;
constexpr int kTileBlocks = 4;    // of 16 tokens: of keys the rows of A, of values its columns
constexpr int kMaskEntries = 16;  // entries of a stream that one bitmap word covers
constexpr int kMaxRows = 4;       // query rows in registers at a time

// Bits of a bitmap word, or of a vector of them, in stream order: entry k of stream s has bit 8 * (k % 4) + 2 * (k / 4)
// + s and gets bit 16 s + k. Both numbers hold the same 5 bits in another order, and every step exchanges two of them.
// exchange(word, shift, mask): the bits under the mask with those `shift` above.
template <class Word, class Exchange>
inline Word shuffle_bits(Word w, Exchange&& exchange) {
  w = exchange(w, std::integral_constant<int, 15>{}, 0x0000aaaau);
  w = exchange(w, std::integral_constant<int, 4>{}, 0x00f000f0u);
  w = exchange(w, std::integral_constant<int, 2>{}, 0x0c0c0c0cu);
  return exchange(w, std::integral_constant<int, 1>{}, 0x22222222u);
}
inline uint32_t shuffle_bits(uint32_t word) {
  return shuffle_bits(word, [](uint32_t w, auto shift, uint32_t mask) {
    uint32_t t = (w ^ (w >> shift())) & mask;
    return w ^ t ^ (t << shift());
  });
}

// The same for the words of a narrow codec: entry k of stream s has bit 16 * (k / 8) + 4 * (k % 4) + 2 * (k / 4 % 2) + s.
inline uint32_t shuffle_narrow_bits(uint32_t word) {
  auto exchange = [](uint32_t w, int shift, uint32_t mask) {
    uint32_t t = (w ^ (w >> shift)) & mask;
    return w ^ t ^ (t << shift);
  };
  word = exchange(exchange(word, 15, 0x0000aaaau), 7, 0x00aa00aau);
  return exchange(exchange(word, 2, 0x0c0c0c0cu), 1, 0x22222222u);
}

// The bitmap words of a block as UnpackedTile::masks.
template <bool kNarrow = false>
inline void unpack_masks(uint32_t const* block, int bitmap_rows, uint16_t* masks) {
  for (int row = 0; row < bitmap_rows; ++row, masks += kTileStreams * kTileLanes)
    for (int lane = 0; lane < kTileLanes; ++lane) {
      uint32_t const word = block[row * kTileLanes + lane];
      uint32_t const bits = kNarrow ? shuffle_narrow_bits(word) : shuffle_bits(word);
      masks[lane] = static_cast<uint16_t>(bits);
      masks[kTileLanes + lane] = static_cast<uint16_t>(bits >> 16);
    }
}

// Blocks of up to Most rows; the rest in blocks of half the size, and so on.
template <int Most, class F>
inline void for_row_blocks(int rows, F&& f) {
  int row = 0;
  for (; row + Most <= rows; row += Most) f(row, std::integral_constant<int, Most>{});
  if constexpr (Most > 1) {
    for_row_blocks<Most / 2>(rows - row, [&](int r, auto n) { f(row + r, n); });
  }
}

}  // namespace
}  // namespace cute_kernels::cpu
