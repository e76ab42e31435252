// A block of query rows against tiles of keys: what sparse_qk and sparse_attention share.
#pragma once

#include "cute_kernels/cpu/product_common.hpp"

namespace cute_kernels::cpu {

// A block of query rows by channel of each entry, times the channels' scales; padding channels are zero.
class QueryPanel {
 public:
  QueryPanel(SparseView const& view, int64_t rows, bool want_pairs)
      : view_(view),
        layout_(product_layout(Role::kKey, view.padded_head_dim)),
        size_(static_cast<int>(layout_.operand_position.size())),
        want_pairs_(want_pairs),
        floats_(rows * size_),
        pairs_(want_pairs ? rows * size_ / kStreams : 0) {}

  // channel_order: of the keys that KV head `head` of q is multiplied with.
  void load(DenseOperand const& q, int group, int64_t head, uint8_t const* channel_order, int64_t first_row, int rows) {
    has_pairs_ = want_pairs_;
    ChannelScales const scales(view_, channel_order);
    for (int n = 0; n < rows; ++n) {
      uint16_t row[format::kMaxHeadDim] = {};
      std::copy_n(static_cast<uint16_t const*>(q.data) + row_offset(view_, q, group, head, first_row + n),
                  view_.head_dim, row);
      for (int i = 0; i < size_; ++i) {
        int const position = layout_.operand_position[i];
        uint16_t const bits = row[channel_order[position]];
        float const x = q.dtype == DType::kBFloat16 ? bfloat16_to_float(bits) : half_to_float(bits);
        floats_[n * size_ + i] = x * scales[position];
      }
      if (!want_pairs_) continue;
      for (int c = 0; c < view_.head_dim; ++c)
        if ((row[c] & 0x7fff) != 0 && (row[c] & 0x7fff) < kMinPairMagnitude) has_pairs_ = false;
      load_pairs(row, channel_order, pairs_.data() + n * size_ / kStreams);
    }
  }

  float const* floats() { return floats_.data(); }
  uint32_t const* pairs() { return has_pairs_ ? pairs_.data() : nullptr; }

 private:
  void load_pairs(uint16_t const* row, uint8_t const* channel_order, uint32_t* out) const {
    int const size = layout_.entries;
    for (int column = 0; column < kLaneColumns; ++column)
      for (int index = 0; index < size; ++index) {
        int const entry = index / kPairBlock * kPairBlock + pair_entry(index % kPairBlock);
        uint8_t const* channel = layout_.operand_position.data() + column * kStreams * size + entry;
        uint32_t const low = row[channel_order[channel[0]]], high = row[channel_order[channel[size]]];
        out[column * size + index] = low | high << 16;
      }
  }

  SparseView const& view_;
  ProductLayout const& layout_;
  int size_;
  bool want_pairs_, has_pairs_ = false;
  AlignedArray<float> floats_;
  AlignedArray<uint32_t> pairs_;
};

// Logits of a block of query rows and one tile of keys after another; one thread's.
class KeyLogits {
 public:
  KeyLogits(Kernels const& isa, SparseView const& view, int64_t rows_at_most)
      : isa_(isa),
        pairs_(pair_kernels(isa, view)),
        view_(view),
        layout_(product_layout(Role::kKey, view.padded_head_dim)),
        scratch_(view),
        panel_(view, rows_at_most, pairs_ != nullptr),
        sums_(rows_at_most * format::kTileTokens) {}

  // As QueryPanel::load.
  void load(DenseOperand const& q, int group, int64_t head, uint8_t const* channel_order, int64_t first_row, int rows) {
    panel_.load(q, group, head, channel_order, first_row, rows);
    rows_ = rows;
  }

  void multiply(int64_t tile_index, int64_t next_tile) {
    PairedTile paired;
    if (panel_.pairs() && scratch_.unpack_pairs(*pairs_, view_, tile_index, next_tile, paired)) {
      pairs_->multiply_keys(paired, view_.padded_head_dim, panel_.pairs(), rows_, sums_.data());
    } else {
      UnpackedTile const unpacked = scratch_.unpack(isa_, view_, tile_index, next_tile);
      isa_.multiply_keys(unpacked, view_.padded_head_dim, panel_.floats(), rows_, sums_.data());
    }
    if (TokenScales const scales(view_, tile_index); scales)
      for (int n = 0; n < rows_; ++n)
        for (int i = 0; i < format::kTileTokens; ++i)
          sums_[n * format::kTileTokens + i] *= scales[layout_.sum_position[i]];
    uint8_t const* token_order = view_.token_order + tile_index * format::kTileTokens;
    for (int i = 0; i < format::kTileTokens; ++i)
      sum_of_token_[token_order[layout_.sum_position[i]]] = static_cast<uint8_t>(i);
  }

  // Row n of what was multiplied last: `valid` logits in the order of tokens.
  void store(int n, float scale, int valid, DType dtype, void* out) {
    isa_.store_logits(sums_.data() + n * format::kTileTokens, sum_of_token_, scale, valid, to_number(dtype), out);
  }

 private:
  Kernels const& isa_;
  PairKernels const* pairs_;
  SparseView const& view_;
  ProductLayout const& layout_;
  TileScratch scratch_;
  QueryPanel panel_;
  AlignedArray<float> sums_;
  uint8_t sum_of_token_[format::kTileTokens];
  int rows_ = 0;
};

}  // namespace cute_kernels::cpu
