// A block of query rows against tiles of keys: what sparse_qk and sparse_attention share.
#pragma once

#include "cute_kernels/cpu/product_common.hpp"

namespace cute_kernels::cpu {

// A block of query rows by channel of each entry; padding channels are zero.
class QueryPanel {
 public:
  QueryPanel(const SparseView& view, int64_t rows, bool want_pairs)
      : view_(view),
        layout_(product_layout(Role::kKey, view.padded_head_dim)),
        size_(static_cast<int>(layout_.operand_position.size())),
        want_pairs_(want_pairs),
        floats_(rows * size_),
        pairs_(want_pairs ? rows * size_ / kStreams : 0) {}

  // channel_order: of the keys that the rows of KV head `head` of q meet.
  void load(const DenseOperand& q, int group, int64_t head, const uint8_t* channel_order, int64_t first_row, int rows) {
    has_pairs_ = want_pairs_;
    for (int n = 0; n < rows; ++n) {
      uint16_t row[format::kMaxHeadDim] = {};
      std::copy_n(static_cast<const uint16_t*>(q.data) + row_offset(view_, q, group, head, first_row + n),
                  view_.head_dim, row);
      for (int i = 0; i < size_; ++i) {
        const uint16_t bits = row[channel_order[layout_.operand_position[i]]];
        floats_[n * size_ + i] = q.dtype == DType::kBFloat16 ? bfloat16_to_float(bits) : half_to_float(bits);
      }
      if (!want_pairs_) continue;
      for (int c = 0; c < view_.head_dim; ++c)
        if ((row[c] & 0x7fff) != 0 && (row[c] & 0x7fff) < kMinPairMagnitude) has_pairs_ = false;
      load_pairs(row, channel_order, pairs_.data() + n * size_ / kStreams);
    }
  }

  const float* floats() { return floats_.data(); }
  const uint32_t* pairs() { return has_pairs_ ? pairs_.data() : nullptr; }

 private:
  void load_pairs(const uint16_t* row, const uint8_t* channel_order, uint32_t* out) const {
    const int slots = layout_.entries;
    for (int column = 0; column < kLaneColumns; ++column)
      for (int slot = 0; slot < slots; ++slot) {
        const int entry = slot / kPairBlock * kPairBlock + pair_slot_entry(slot % kPairBlock);
        const uint8_t* channel = layout_.operand_position.data() + column * kStreams * slots + entry;
        out[column * slots + slot] = row[channel_order[channel[0]]] | uint32_t{row[channel_order[channel[slots]]]}
                                                                          << 16;
      }
  }

  const SparseView& view_;
  const ProductLayout& layout_;
  int size_;
  bool want_pairs_, has_pairs_ = false;
  AlignedArray<float> floats_;
  AlignedArray<uint32_t> pairs_;
};

// Logits of a block of query rows and one tile of keys after another; one thread's.
class KeyLogits {
 public:
  KeyLogits(const Kernels& isa, const SparseView& view, int64_t rows_at_most)
      : isa_(isa),
        pairs_(pair_kernels(isa, view)),
        view_(view),
        layout_(product_layout(Role::kKey, view.padded_head_dim)),
        scratch_(view),
        panel_(view, rows_at_most, pairs_ != nullptr),
        sums_(rows_at_most * format::kTileTokens) {}

  // As QueryPanel::load.
  void load(const DenseOperand& q, int group, int64_t head, const uint8_t* channel_order, int64_t first_row, int rows) {
    panel_.load(q, group, head, channel_order, first_row, rows);
    rows_ = rows;
  }

  void multiply(int64_t tile_index, int64_t next_tile) {
    PairedTile paired;
    if (panel_.pairs() && scratch_.unpack_pairs(*pairs_, view_, tile_index, next_tile, paired)) {
      pairs_->multiply_keys(paired, view_.padded_head_dim, panel_.pairs(), rows_, sums_.data());
    } else {
      const UnpackedTile unpacked = scratch_.unpack(isa_, view_, tile_index, next_tile);
      isa_.multiply_keys(unpacked, view_.padded_head_dim, panel_.floats(), rows_, sums_.data());
    }
    const uint8_t* token_order = view_.token_order + tile_index * format::kTileTokens;
    for (int i = 0; i < format::kTileTokens; ++i)
      sum_of_token_[token_order[layout_.sum_position[i]]] = static_cast<uint8_t>(i);
  }

  // Row n of what was multiplied last: `valid` logits in the order of tokens.
  void store(int n, float scale, int valid, DType dtype, void* out) {
    isa_.store_logits(sums_.data() + n * format::kTileTokens, sum_of_token_, scale, valid, to_number(dtype), out);
  }

 private:
  const Kernels& isa_;
  const PairKernels* pairs_;
  const SparseView& view_;
  const ProductLayout& layout_;
  TileScratch scratch_;
  QueryPanel panel_;
  AlignedArray<float> sums_;
  uint8_t sum_of_token_[format::kTileTokens];
  int rows_ = 0;
};

}  // namespace cute_kernels::cpu
