// Values of one tile after another, weighted by rows of p and summed: what sparse_av and sparse_attention share.
#pragma once

#include <vector>

#include "cute_kernels/cpu/product_common.hpp"

namespace cute_kernels::cpu {

// Sums of a block of query rows over the tiles of a KV head; one thread's.
class ValueSums {
 public:
  ValueSums(Kernels const& isa, SparseView const& view, DType weight_dtype, int64_t rows_at_most)
      : isa_(isa),
        pairs_(pair_kernels(isa, view)),
        view_(view),
        weight_dtype_(weight_dtype),
        layout_(product_layout(Role::kValue, view.padded_head_dim)),
        panel_size_(static_cast<int>(layout_.operand_position.size())),
        parts_(weight_dtype == DType::kBFloat16 ? 1 : 2),
        scratch_(view),
        panel_(rows_at_most * panel_size_),
        pair_panel_(pairs_ ? rows_at_most * parts_ * panel_size_ / kStreams : 0),
        sums_(rows_at_most * row_sums()),
        pair_sums_(pairs_ ? rows_at_most * row_sums() : 0) {
    for (int i = 0; i < panel_size_ / kStreams; ++i)
      for (int s = 0; s < kStreams; ++s) {
        int const column = i / layout_.entries, entry = pair_entry(pair_value_index(i % layout_.entries));
        pair_position_.push_back(layout_.operand_position[(column * kStreams + s) * layout_.entries + entry]);
      }
  }

  void clear() { any_floats_ = any_pairs_ = false; }

  // weights(n): row n's weights of the tile's first `valid` tokens; those of the others are 0.
  template <class Weights>
  void add(int64_t tile_index, int64_t next_tile, int rows, int valid, Weights&& weights) {
    auto row = [&](int n) { return weight_row(tile_index, valid, weights(n)); };
    PairedTile paired;
    if (pairs_ && load_pair_panel(rows, row) && scratch_.unpack_pairs(*pairs_, view_, tile_index, next_tile, paired)) {
      begin(any_pairs_, pair_sums_, rows);
      pairs_->multiply_values(paired, view_.padded_head_dim, pair_panel_.data(), parts_, rows, pair_sums_.data());
      return;
    }
    for (int n = 0; n < rows; ++n) load_panel(n, row(n), tile_index);
    UnpackedTile const unpacked = scratch_.unpack(isa_, view_, tile_index, next_tile);
    begin(any_floats_, sums_, rows);
    isa_.multiply_values(unpacked, view_.padded_head_dim, panel_.data(), rows, sums_.data());
  }

  // As `add`, but row n sees the first visible[n] tokens only: the values of the others are zeroed. A weight of 0 times
  // a NaN or an infinity would be NaN.
  template <class Weights>
  void add_visible(int64_t tile_index, int rows, int const* visible, Weights&& weights) {
    UnpackedTile const unpacked = scratch_.unpack(isa_, view_, tile_index, -1);
    begin(any_floats_, sums_, rows);
    for (int count = format::kTileTokens; count > 0; --count) {
      if (std::find(visible, visible + rows, count) == visible + rows) continue;
      zero_values(count, tile_index, unpacked);
      for (int n = 0; n < rows; ++n) {
        if (visible[n] != count) continue;
        load_panel(n, weight_row(tile_index, count, weights(n)), tile_index);
        isa_.multiply_values(unpacked, view_.padded_head_dim, panel_.data() + n * panel_size_, 1,
                             sums_.data() + n * row_sums());
      }
    }
  }

  // Multiplies the sums of row n.
  void scale(int n, float factor) {
    for (auto [any, sums] : {std::pair(any_floats_, sums_.data()), std::pair(any_pairs_, pair_sums_.data())})
      for (int64_t i = n * row_sums(); any && i < (n + 1) * row_sums(); ++i) sums[i] *= factor;
  }

  // out (rows, padded_head_dim), by channel, times the channels' scales: overwritten.
  void store(uint8_t const* channel_order, int rows, float* out) {
    std::fill_n(out, int64_t{rows} * view_.padded_head_dim, 0.f);
    ChannelScales const scales(view_, channel_order);
    if (any_floats_) add_by_channel(sums_.data(), channel_order, scales, rows, out);
    if (any_pairs_) add_by_channel(pair_sums_.data(), channel_order, scales, rows, out);
  }

 private:
  WeightRow weight_row(int64_t tile_index, int valid, void const* weights) const {
    return {weights, to_number(weight_dtype_), valid, view_.token_order + tile_index * format::kTileTokens};
  }

  // The weights times the tokens' scales.
  void load_panel(int n, WeightRow const& row, int64_t tile_index) {
    float* panel = panel_.data() + n * panel_size_;
    isa_.make_weights(row, layout_.operand_position.data(), panel);
    if (TokenScales const scales(view_, tile_index); scales)
      for (int i = 0; i < panel_size_; ++i) panel[i] *= scales[layout_.operand_position[i]];
  }

  template <class Row>
  bool load_pair_panel(int rows, Row&& row) {
    int const row_size = parts_ * panel_size_ / kStreams;
    for (int n = 0; n < rows; ++n)
      if (!pairs_->make_weights(row(n), pair_position_.data(), parts_, pair_panel_.data() + n * row_size)) return false;
    return true;
  }

  void begin(bool& any, AlignedArray<float>& sums, int rows) {
    if (!any) std::fill_n(sums.data(), rows * row_sums(), 0.f);
    any = true;
  }

  // Zeros the values of tokens from `count` on.
  void zero_values(int count, int64_t tile_index, UnpackedTile const& tile) const {
    std::vector<uint16_t> const& position = element_table(Role::kValue, view_.padded_head_dim);
    uint8_t const* token_order = view_.token_order + tile_index * format::kTileTokens;
    int const elements = TileFormat::lane_elements(view_.padded_head_dim), entries = layout_.entries;
    for (int lane = 0; lane < format::kLanes; ++lane)
      for (int s = 0; s < kStreams; ++s) {
        float* value = tile.streams + (lane * kStreams + s) * tile.stride;
        for (int entry = 0; entry < elements / kStreams; ++entry) {
          int const mask = tile.masks[(entry / entries * kStreams + s) * format::kLanes + lane];
          if (!(mask >> entry % entries & 1)) continue;
          int const token_position = position[lane * elements + kStreams * entry + s] / view_.padded_head_dim;
          if (token_order[token_position] >= count) *value = 0.f;
          ++value;
        }
      }
  }

  int64_t row_sums() const { return int64_t{kLaneRows} * layout_.blocks * kSumWidth; }

  // sums (rows, [row][c][kSumWidth]).
  void add_by_channel(float const* sums, uint8_t const* channel_order, ChannelScales const& scales, int rows,
                      float* out) const {
    for (int n = 0; n < rows; ++n, out += view_.padded_head_dim)
      for (int i = 0; i < kLaneRows * layout_.blocks; ++i, sums += kSumWidth) {
        float four[4] = {};
        for (int j = 0; j < kSumWidth; j += 4)
          for (int k = 0; k < 4; ++k) four[k] += sums[j + k];
        for (int odd = 0; odd < 2; ++odd) {
          int const position = layout_.sum_position[2 * i + odd];
          out[channel_order[position]] += (four[2 * odd] + four[2 * odd + 1]) * scales[position];
        }
      }
  }

  Kernels const& isa_;
  PairKernels const* pairs_;
  SparseView const& view_;
  DType weight_dtype_;
  ProductLayout const& layout_;
  int panel_size_, parts_;  // panel_size_: of a row
  TileScratch scratch_;
  AlignedArray<float> panel_;
  AlignedArray<uint32_t> pair_panel_;
  AlignedArray<float> sums_, pair_sums_;  // each of the tiles that it serves
  std::vector<uint8_t> pair_position_;    // [column][16][stream] -> token position
  bool any_floats_ = false, any_pairs_ = false;
};

// One row of results, rounded to `dtype`.
inline void store_row(float const* in, int count, DType dtype, uint16_t* out) {
  if (dtype == DType::kBFloat16)
    for (int i = 0; i < count; ++i) out[i] = float_to_bfloat16(in[i]);
  else
    for (int i = 0; i < count; ++i) out[i] = float_to_half(in[i]);
}

}  // namespace cute_kernels::cpu
