// The kernels that are compiled once for each instruction set. These files include no header of the format: of an
// inline function that several objects hold the linker keeps one, and that one might be compiled with AVX-512 and crash
// older CPUs. Layout is passed as tables (layout.hpp).
#pragma once

#include <cstdint>

namespace cute_kernels::cpu {

inline constexpr int kTokensOfTile = 64;
inline constexpr int kVectorPadding = 32;  // values that a vector load may read beyond the end of a stream
inline constexpr int kSumWidth = 8;        // parts of two sums, of the even and the odd pairs of a vector's entries

enum class Number : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };  // as DType

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
  void const* data;
  Number dtype;
  int valid;                   // tokens that the tile has; p of the others is 0
  uint8_t const* token_order;  // token_position -> token
};

// The products of bf16 by pairs of entries, one of each stream: both share the token (keys: two channels) or the
// channel (values: two tokens). The entries of a block of 32, two bitmap words, come in the order of pair_entry.
// The hardware flushes subnormals, so these serve only tiles and operands far above them, see
// kMinPairMagnitude; others take the float kernels.
struct PairKernels {
  // False: the tile holds Inf, NaN or nonzeros below kMinPairMagnitude, and is not unpacked.
  bool (*unpack)(uint32_t const* block, int bitmap_rows, int value_rows, PairedTile const& tile);

  // panel (rows, [column][index]): q of stream 0 in the low half, of stream 1 in the high half. sums as in Kernels.
  void (*multiply_keys)(PairedTile const& tile, int head_dim, uint32_t const* panel, int rows, float* sums);

  // One row of p as a panel [part][column][16] of pairs; parts = 2: every weight is the sum of two bf16. Both words of
  // a block are multiplied by the same weights, so a panel has those of one word, of the indices pair_value_index.
  // position: [column][16][stream] -> token_position. False: the weights are too small for pairs.
  bool (*make_weights)(WeightRow const& p, uint8_t const* position, int parts, uint32_t* panel);

  // panel (rows, parts, ...). sums (rows, [row][c][kSumWidth]) as in Kernels.
  void (*multiply_values)(PairedTile const& tile, int head_dim, uint32_t const* panel, int parts, int rows,
                          float* sums);
};

inline constexpr int kPairBlock = 32;
// Index in two vectors of 16 pairs -> entry within a block of 32: unpacking 16-bit vectors takes 4 entries out of
// every 8.
constexpr int pair_entry(int index) { return index / 16 * 4 + index % 16 / 4 * 8 + index % 4; }
constexpr int pair_value_index(int i) { return i / 8 * 16 + i % 8; }  // the 16 indices of the entries of one word
inline constexpr uint16_t kMinPairMagnitude = (127 - 50) << 7;  // 2^-50 as bf16: sums of products stay far above 2^-126

// One query row's softmax over the tiles so far: the largest logit, and the sum of exponentials relative to it.
struct RunningSoftmax {
  float row_max, row_sum;
};

// 64 dense tokens as floats by channel; missing channels and tokens are zeros.
struct DenseTile {
  float* rows;  // (64, padded_head_dim)
  int padded_head_dim;
  int tokens;  // that are not missing
};

struct Kernels {
  char const* name;

  void (*unpack)(uint32_t const* block, int bitmap_rows, int value_rows, bool bfloat16, UnpackedTile const& tile);

  // panel (rows, [column][stream][entries]): q by channel of the entry. sums (rows, [row][c][2]): overwritten.
  void (*multiply_keys)(UnpackedTile const& tile, int head_dim, float const* panel, int rows, float* sums);

  // One row of sums, scaled, in the order of tokens. sum_of_token: token within the tile -> sum.
  void (*store_logits)(float const* sums, uint8_t const* sum_of_token, float scale, int valid, Number dtype, void* out);

  // One row of p as a panel [column][stream][16]; position: the same order -> token_position.
  void (*make_weights)(WeightRow const& p, uint8_t const* position, float* panel);

  // panel (rows, [column][stream][16]): p by token of the entry. sums (rows, [row][c][kSumWidth]): added to.
  void (*multiply_values)(UnpackedTile const& tile, int head_dim, float const* panel, int rows, float* sums);

  // One token: sets mask (padded_head_dim / 32 words), adds the kept to counts if any, writes pruned if any.
  void (*select_row)(uint16_t const* x, int head_dim, int padded_head_dim, bool bfloat16, int keep, uint32_t* mask,
                     int32_t* counts, uint16_t* pruned);

  // Logits of one row over a tile, of which it sees the first `visible`, become exponentials relative to the running
  // maximum, 0 for the others, and are added to the running sum. Returns what earlier sums have to be multiplied by.
  float (*softmax)(float* logits, int visible, RunningSoftmax* running);

  // `head_dim` 16-bit values as floats, followed by zeros up to padded_head_dim.
  void (*widen)(uint16_t const* in, int head_dim, int padded_head_dim, bool bfloat16, float* out);

  // q (rows, padded_head_dim), logits (rows, 64): scale * q K^T.
  void (*dense_logits)(DenseTile const& keys, float const* q, int rows, float scale, float* logits);

  // weights (rows, 64) of the first visible[row] tokens each. sums (rows, padded_head_dim): added to.
  void (*dense_values)(DenseTile const& values, float const* weights, int const* visible, int rows, float* sums);

  PairKernels const* pairs;  // or null
};

// Of kernels that are instantiated for some head_dims only. std::invalid_argument.
[[noreturn]] void throw_head_dim(int head_dim);

// The best kernels that this CPU runs, or those that the environment variable CUTE_KERNELS_CPU_ISA names.
// Throws std::runtime_error if it names something unknown or more than this CPU or build has.
Kernels const& kernels();

// Null where the build has no such kernels.
Kernels const* scalar_kernels();
Kernels const* avx2_kernels();
Kernels const* avx512_kernels();
PairKernels const* avx512_bf16_pair_kernels();

}  // namespace cute_kernels::cpu
