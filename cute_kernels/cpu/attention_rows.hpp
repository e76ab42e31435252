// Attention of a block of query rows over a range of tokens: one task of sparse_attention.
#pragma once

#include <algorithm>
#include <cmath>

#include "cute_kernels/cpu/key_logits.hpp"
#include "cute_kernels/cpu/value_sums.hpp"
#include "cute_kernels/ops/attention/problem.hpp"

namespace cute_kernels::cpu {

using attention::Problem;

// The tokens that a batch row attends to: the compressed tokens of row `index` of the caches, then those of its window.
// Tiles are counted over both; the window begins with a tile of its own.
struct Sequence {
  int index;
  int64_t compressed, window;  // tokens

  int64_t tokens() const { return compressed + window; }
  int64_t compressed_tiles() const { return ceil_div(compressed, format::kTileTokens); }
  int64_t tiles() const { return compressed_tiles() + ceil_div(window, format::kTileTokens); }
};

// A row of the batch: its queries, as a batch of one, and the tokens that they attend to.
struct BatchRow {
  DenseOperand q;
  Sequence sequence;
};

// Rows [first_row, first_row + rows) of a KV head, of those that its group's query heads have with all query tokens.
struct RowBlock {
  int kv_head;
  int64_t first_row;
  int rows;
};

// Scratch of one thread, and the walk over the tiles.
class AttentionRows {
 public:
  AttentionRows(Kernels const& isa, Problem const& problem, int64_t rows_at_most)
      : isa_(isa),
        problem_(problem),
        group_(problem.q_heads / problem.keys.kv_heads),
        padded_(problem.keys.padded_head_dim),
        logits_(isa, problem.keys, rows_at_most),
        sums_(isa, problem.values, DType::kFloat32, rows_at_most),
        weights_(rows_at_most * kTileTokens),
        dense_q_(problem.window.tokens ? rows_at_most * padded_ : 0),
        dense_tile_(problem.window.tokens ? kTileTokens * padded_ : 0) {}

  // The existing tiles of [first_tile, last_tile). softmax (rows), sums (rows, padded_head_dim) by channel, not
  // divided by the sum of exponentials: overwritten.
  void run(RowBlock const& block, BatchRow const& row, int64_t first_tile, int64_t last_tile, RunningSoftmax* softmax,
           float* sums) {
    Sequence const& sequence = row.sequence;
    block_ = block, q_ = row.q, sequence_ = sequence, softmax_ = softmax;
    std::fill_n(softmax, block.rows, RunningSoftmax{-INFINITY, 0.f});
    int64_t most = 0;
    for (int n = 0; n < block.rows; ++n) {
      int64_t const newer = problem_.causal ? q_.tokens - 1 - (block.first_row + n) % q_.tokens : 0;
      seen_[n] = std::max<int64_t>(0, sequence.tokens() - newer);
      most = std::max(most, seen_[n]);
    }
    int64_t const compressed_tiles = ceil_div(std::min(most, sequence.compressed), kTileTokens);
    int64_t const last_compressed = std::min(last_tile, compressed_tiles);
    sums_.clear();
    if (first_tile < last_compressed) load_queries();
    for (int64_t tile = first_tile; tile < last_compressed; ++tile) add_compressed(tile, tile + 1 < last_compressed);
    sums_.store(channel_order(problem_.values), block.rows, sums);

    int64_t const first_window = std::max<int64_t>(first_tile - sequence.compressed_tiles(), 0);
    int64_t const last_window =
        std::min(last_tile - sequence.compressed_tiles(), ceil_div(most - sequence.compressed, kTileTokens));
    if (first_window >= last_window) return;
    widen_queries();
    for (int64_t tile = first_window; tile < last_window; ++tile) add_dense(tile, sums);
  }

 private:
  static constexpr int kTileTokens = format::kTileTokens;

  uint8_t const* channel_order(SparseView const& view) const {
    return view.channel_order_of(sequence_.index, block_.kv_head);
  }

  void load_queries() {
    logits_.load(q_, group_, block_.kv_head, channel_order(problem_.keys), block_.first_row, block_.rows);
  }

  void widen_queries() {
    for (int n = 0; n < block_.rows; ++n) {
      int64_t const offset = row_offset(problem_.keys, q_, group_, block_.kv_head, block_.first_row + n);
      isa_.widen(static_cast<uint16_t const*>(q_.data) + offset, problem_.keys.head_dim, padded_,
                 q_.dtype == DType::kBFloat16, dense_q_.data() + n * padded_);
    }
  }

  // Sets how many tokens of a tile every row sees. The tile begins with token `first`; there are tokens up to `end`.
  void set_visible(int64_t first, int64_t end) {
    for (int n = 0; n < block_.rows; ++n)
      visible_[n] = static_cast<int>(std::clamp<int64_t>(std::min(seen_[n], end) - first, 0, kTileTokens));
  }

  float* row_weights(int n) { return weights_.data() + n * kTileTokens; }

  // Logits become weights; rescale(row, factor) is called for rows whose earlier sums must be multiplied.
  template <class Rescale>
  void softmax(Rescale&& rescale) {
    for (int n = 0; n < block_.rows; ++n) {
      float const factor = isa_.softmax(row_weights(n), visible_[n], softmax_ + n);
      if (factor != 1.f) rescale(n, factor);
    }
  }

  void add_compressed(int64_t tile, bool is_followed) {
    SparseView const &keys = problem_.keys, &values = problem_.values;
    auto index_of = [&](SparseView const& view, int64_t t) {
      return view.tile_index(sequence_.index, block_.kv_head, static_cast<int>(t));
    };
    int64_t const next_key = is_followed ? index_of(keys, tile + 1) : -1;
    int64_t const next_value = is_followed ? index_of(values, tile + 1) : -1;
    logits_.multiply(index_of(keys, tile), next_key);
    for (int n = 0; n < block_.rows; ++n)
      logits_.store(n, problem_.scale, kTileTokens, DType::kFloat32, row_weights(n));
    set_visible(tile * kTileTokens, sequence_.compressed);
    softmax([&](int n, float factor) { sums_.scale(n, factor); });

    auto weights = [&](int n) { return row_weights(n); };
    int64_t const value_tile = index_of(values, tile);
    int64_t const stored = std::min<int64_t>(kTileTokens, values.tokens - tile * kTileTokens);
    bool const all_see_all = *std::min_element(visible_, visible_ + block_.rows) >= stored;
    if (all_see_all || has_finite_values(values, value_tile))
      sums_.add(value_tile, next_value, block_.rows, kTileTokens, weights);
    else
      sums_.add_visible(value_tile, block_.rows, visible_, weights);
  }

  // Tile `tile` of the window.
  void add_dense(int64_t tile, float* sums) {
    set_visible(sequence_.compressed + tile * kTileTokens, sequence_.tokens());
    int const tokens = *std::max_element(visible_, visible_ + block_.rows);
    attention::Window const& window = problem_.window;
    DenseTile const dense{dense_tile_.data(), padded_, tokens};
    load_window(window.keys, window.key_strides, tile, dense);
    isa_.dense_logits(dense, dense_q_.data(), block_.rows, problem_.scale, weights_.data());
    softmax([&](int n, float factor) {
      for (int i = 0; i < padded_; ++i) sums[n * padded_ + i] *= factor;
    });
    load_window(window.values, window.value_strides, tile, dense);
    isa_.dense_values(dense, weights_.data(), visible_, block_.rows, sums);
  }

  // Tokens that no row sees are not read.
  void load_window(void const* data, int64_t const (&strides)[3], int64_t tile, DenseTile const& dense) const {
    uint16_t const* from = static_cast<uint16_t const*>(data) + sequence_.index * strides[0] +
                           block_.kv_head * strides[1] + tile * kTileTokens * strides[2];
    for (int token = 0; token < dense.tokens; ++token)
      isa_.widen(from + token * strides[2], problem_.keys.head_dim, padded_, q_.dtype == DType::kBFloat16,
                 dense.rows + token * padded_);
    std::fill(dense.rows + dense.tokens * padded_, dense.rows + kTileTokens * padded_, 0.f);
  }

  Kernels const& isa_;
  Problem const& problem_;
  int group_, padded_;
  KeyLogits logits_;
  ValueSums sums_;               // over compressed tokens
  AlignedArray<float> weights_;  // (rows, 64): logits of the tile, then its weights
  AlignedArray<float> dense_q_, dense_tile_;
  RowBlock block_{};
  DenseOperand q_{};
  Sequence sequence_{};
  RunningSoftmax* softmax_ = nullptr;
  int64_t seen_[kRowsPerTask];  // tokens that a row sees
  int visible_[kRowsPerTask];   // of those, how many are in the tile
};

}  // namespace cute_kernels::cpu
