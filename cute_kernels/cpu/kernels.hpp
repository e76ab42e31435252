// What is compiled once for each instruction set. Free of the format's headers on purpose: an inline function compiled
// with AVX-512 that the linker kept for everyone would crash older CPUs. Layout comes in as tables (layout.hpp).
#pragma once

#include <cstdint>

namespace cute_kernels::cpu {

inline constexpr int kTokensOfTile = 64;
inline constexpr int kVectorPadding = 32;  // values that a vector load may read beyond the end of a stream
inline constexpr int kSumWidth = 8;        // parts of two sums, of the even and the odd pairs of a vector's entries

enum class Number : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };  // as format::DType

// A tile ready to be multiplied.
struct UnpackedTile {
  uint16_t* masks;  // (bitmap_rows, 2, 32): which of the 16 entries of a stream that a bitmap word covers are nonzero
  float* streams;   // (32, 2, stride): nonzeros in stream order
  int stride;       // at least the longest stream, rounded up to 16, + kVectorPadding
};

// A tile of bf16 for instructions that multiply pairs of bf16; 32 entries of a stream at a time.
struct PairedTile {
  uint32_t* masks;    // (bitmap_rows / 2, 2, 32)
  uint16_t* streams;  // (32, 2, stride)
  int stride;
};

// One row of p over the tokens of a tile.
struct WeightRow {
  const void* data;
  Number dtype;
  int valid;                   // tokens of the tile that there are; p of the others is 0
  const uint8_t* token_order;  // token_position -> token
};

// The products of bf16 by pairs of entries, one of each stream: both share the token (keys: two channels) or the
// channel (values: two tokens). The entries of a block of 32, two bitmap words, come in the order of pair_slot_entry.
// The hardware flushes subnormals, so these serve only tiles and operands with none of them near, see
// kMinPairMagnitude; others take the float kernels.
struct PairKernels {
  // False: the tile holds Inf, NaN or nonzeros below kMinPairMagnitude, and is not unpacked.
  bool (*unpack)(const uint32_t* block, int bitmap_rows, int value_rows, const PairedTile& tile);

  // panel (rows, [column][slot]): q of stream 0 in the low half, of stream 1 in the high half. sums as in Kernels.
  void (*multiply_keys)(const PairedTile& tile, int head_dim, const uint32_t* panel, int rows, float* sums);

  // One row of p as a panel [part][column][16] of pairs; parts = 2: every weight is the sum of two bf16. Both words of
  // a block take the same weights, so 16 of its 32 slots do, those of pair_value_slot. position: [column][16][stream]
  // -> token_position. False: the weights are too small for pairs.
  bool (*make_weights)(const WeightRow& p, const uint8_t* position, int parts, uint32_t* panel);

  // panel (rows, parts, ...). sums (rows, [row][c][kSumWidth]) as in Kernels.
  void (*multiply_values)(const PairedTile& tile, int head_dim, const uint32_t* panel, int parts, int rows,
                          float* sums);
};

inline constexpr int kPairBlock = 32;
// Slot -> entry within a block of 32: unpacking 16-bit vectors takes 4 entries out of every 8.
constexpr int pair_slot_entry(int slot) { return slot / 16 * 4 + slot % 16 / 4 * 8 + slot % 4; }
constexpr int pair_value_slot(int i) { return i / 8 * 16 + i % 8; }  // 16 slots that cover the entries of one word
inline constexpr uint16_t kMinPairMagnitude = (127 - 50) << 7;  // 2^-50 as bf16: sums of products stay far above 2^-126

// One query row's softmax over the tiles so far: the largest logit, and the sum of exponentials relative to it.
struct RunningSoftmax {
  float max, sum;
};

// 64 tokens that lie dense, as floats by channel; channels padded with zeros, as are tokens that there are not.
struct DenseTile {
  float* rows;  // (64, padded_head_dim)
  int padded_head_dim;
  int tokens;  // that there are
};

struct Kernels {
  const char* name;

  void (*unpack)(const uint32_t* block, int bitmap_rows, int value_rows, bool bfloat16, const UnpackedTile& tile);

  // panel (rows, [column][stream][entries]): q by channel of the entry. sums (rows, [row][c][2]): overwritten.
  void (*multiply_keys)(const UnpackedTile& tile, int head_dim, const float* panel, int rows, float* sums);

  // One row of sums, scaled, in the order of tokens. sum_of_token: token within the tile -> sum.
  void (*store_logits)(const float* sums, const uint8_t* sum_of_token, float scale, int valid, Number dtype, void* out);

  // One row of p as a panel [column][stream][16]; position: the same order -> token_position.
  void (*make_weights)(const WeightRow& p, const uint8_t* position, float* panel);

  // panel (rows, [column][stream][16]): p by token of the entry. sums (rows, [row][c][kSumWidth]): added to.
  void (*multiply_values)(const UnpackedTile& tile, int head_dim, const float* panel, int rows, float* sums);

  // One token: sets mask (padded_head_dim / 32 words), adds the kept to counts if any, writes pruned if any.
  void (*select_row)(const uint16_t* x, int head_dim, int padded_head_dim, bool bfloat16, int keep, uint32_t* mask,
                     int32_t* counts, uint16_t* pruned);

  // Logits of one row over a tile, of which it sees the first `visible`, become exponentials relative to the running
  // maximum, 0 for the others, and are added to the running sum. Returns what earlier sums have to be multiplied by.
  float (*softmax)(float* logits, int visible, RunningSoftmax* running);

  // `head_dim` 16-bit values as floats, followed by zeros up to padded_head_dim.
  void (*widen)(const uint16_t* in, int head_dim, int padded_head_dim, bool bfloat16, float* out);

  // q (rows, padded_head_dim), logits (rows, 64): scale * q K^T.
  void (*dense_logits)(const DenseTile& keys, const float* q, int rows, float scale, float* logits);

  // weights (rows, 64) of the first visible[row] tokens each. sums (rows, padded_head_dim): added to.
  void (*dense_values)(const DenseTile& values, const float* weights, const int* visible, int rows, float* sums);

  const PairKernels* pairs;  // or null
};

// The best kernels that this CPU runs, or those that the environment variable CUTE_KERNELS_CPU_ISA names.
// Throws std::runtime_error if it names something unknown or more than this CPU or build has.
const Kernels& kernels();

// Null where the build has no such kernels.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const PairKernels* avx512_bf16_pair_kernels();

}  // namespace cute_kernels::cpu
