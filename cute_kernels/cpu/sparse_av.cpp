// p V: a head's tiles are cut into pieces that depend on the shape only, and the pieces are summed in order, so the
// result does not depend on how many threads there are or on their timing.
#include <vector>

#include "cute_kernels/cpu/product_common.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kTileTokens;

constexpr int64_t kTargetTasks = 256;     // for up to this many threads to be busy
constexpr int64_t kMinTilesPerPiece = 16; // below, summing the pieces outweighs the tiles

// p V of a block of query rows over a run of tiles, one thread's.
class PieceProduct {
 public:
  PieceProduct(const Kernels& isa, const SparseView& view, const DenseOperand& p, const QueryRows& query,
               int64_t rows_at_most)
      : isa_(isa),
        pairs_(pair_kernels(isa, view)),
        view_(view),
        p_(p),
        query_(query),
        layout_(product_layout(Role::kValue, view.padded_head_dim)),
        panel_size_(static_cast<int>(layout_.operand_position.size())),
        parts_(p.dtype == DType::kBFloat16 ? 1 : 2),
        scratch_(view),
        panel_(rows_at_most * panel_size_),
        pair_panel_(pairs_ ? rows_at_most * parts_ * panel_size_ / kStreams : 0),
        sums_(rows_at_most * row_sums()),
        pair_sums_(pairs_ ? rows_at_most * row_sums() : 0) {
    for (int i = 0; i < panel_size_ / kStreams; ++i)
      for (int s = 0; s < kStreams; ++s) {
        const int column = i / layout_.entries, entry = pair_slot_entry(pair_value_slot(i % layout_.entries));
        pair_position_.push_back(layout_.operand_position[(column * kStreams + s) * layout_.entries + entry]);
      }
  }

  // out (rows, padded_head_dim), by channel: overwritten.
  void run(int64_t head, int64_t first_row, int rows, int64_t first_tile, int64_t last_tile, float* out) {
    head_ = head, first_row_ = first_row, rows_ = rows;
    bool any_floats = false, any_pairs = false;
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      PairedTile paired;
      const int64_t tile_index = head * view_.tiles_per_head() + tile;
      if (pairs_ && load_pair_panel(tile) && scratch_.unpack_pairs(*pairs_, view_, tile_index, paired)) {
        if (!any_pairs) std::fill_n(pair_sums_.data(), rows * row_sums(), 0.f);
        any_pairs = true;
        pairs_->multiply_values(paired, view_.padded_head_dim, pair_panel_.data(), parts_, rows, pair_sums_.data());
        continue;
      }
      for (int n = 0; n < rows; ++n)
        isa_.make_weights(weights(tile, n), layout_.operand_position.data(), panel_.data() + n * panel_size_);
      const UnpackedTile unpacked = scratch_.unpack(isa_, view_, tile_index);
      if (!any_floats) std::fill_n(sums_.data(), rows * row_sums(), 0.f);
      any_floats = true;
      isa_.multiply_values(unpacked, view_.padded_head_dim, panel_.data(), rows, sums_.data());
    }
    std::fill_n(out, int64_t{rows} * view_.padded_head_dim, 0.f);
    if (any_floats) add_by_channel(sums_.data(), out);
    if (any_pairs) add_by_channel(pair_sums_.data(), out);
  }

 private:
  WeightRow weights(int64_t tile, int n) const {
    const int64_t offset = row_offset(view_, p_, query_.group, head_, first_row_ + n) + tile * kTileTokens;
    const int valid = static_cast<int>(std::min<int64_t>(kTileTokens, view_.tokens - tile * kTileTokens));
    return {element_pointer(p_.data, p_.dtype, offset), to_number(p_.dtype), valid,
            view_.token_order + (head_ * view_.tiles_per_head() + tile) * kTileTokens};
  }

  bool load_pair_panel(int64_t tile) {
    const int row_size = parts_ * panel_size_ / kStreams;
    for (int n = 0; n < rows_; ++n)
      if (!pairs_->make_weights(weights(tile, n), pair_position_.data(), parts_, pair_panel_.data() + n * row_size))
        return false;
    return true;
  }

  int64_t row_sums() const { return int64_t{kLaneRows} * layout_.blocks * kSumWidth; }

  // sums (rows, [row][c][kSumWidth]).
  void add_by_channel(const float* sums, float* out) const {
    const uint8_t* channel_order = view_.channel_order + head_ * view_.padded_head_dim;
    for (int n = 0; n < rows_; ++n, out += view_.padded_head_dim)
      for (int i = 0; i < kLaneRows * layout_.blocks; ++i, sums += kSumWidth) {
        float four[4] = {};
        for (int j = 0; j < kSumWidth; j += 4)
          for (int k = 0; k < 4; ++k) four[k] += sums[j + k];
        for (int odd = 0; odd < 2; ++odd)
          out[channel_order[layout_.sum_position[2 * i + odd]]] += four[odd] + four[odd + 2];
      }
  }

  const Kernels& isa_;
  const PairKernels* pairs_;
  const SparseView& view_;
  const DenseOperand& p_;
  const QueryRows& query_;
  const ProductLayout& layout_;
  int panel_size_, parts_;  // panel_size_: of a row
  TileScratch scratch_;
  AlignedArray<float> panel_;
  AlignedArray<uint32_t> pair_panel_;
  AlignedArray<float> sums_, pair_sums_;  // each of the tiles that it serves
  std::vector<uint8_t> pair_position_;    // [column][16][stream] -> token position
  int64_t head_ = 0, first_row_ = 0;
  int rows_ = 0;
};

void store_row(const float* in, int count, DType dtype, uint16_t* out) {
  if (dtype == DType::kBFloat16)
    for (int i = 0; i < count; ++i) out[i] = float_to_bfloat16(in[i]);
  else
    for (int i = 0; i < count; ++i) out[i] = float_to_half(in[i]);
}

}  // namespace

void sparse_av(const SparseView& view, const DenseOperand& p, uint16_t* out, int threads) {
  const Kernels& isa = kernels();
  const QueryRows query(view, p);
  const int padded = view.padded_head_dim;
  const int64_t tiles = view.tiles_per_head(), segments = view.heads() * query.blocks;
  if (segments == 0) return;
  const int64_t tiles_per_piece =
      std::max(kMinTilesPerPiece, ceil_div(tiles, std::max<int64_t>(1, kTargetTasks / segments)));
  const int64_t pieces = std::max<int64_t>(1, ceil_div(tiles, tiles_per_piece));
  const int64_t rows_at_most = std::min<int64_t>(query.per_head, kRowsPerTask);
  const int64_t out_size = rows_at_most * padded;
  AlignedArray<float> partials(pieces > 1 ? segments * pieces * out_size : 0);  // (segments, pieces, rows, padded)

  auto rows_of = [&](int64_t segment) {
    return static_cast<int>(std::min<int64_t>(kRowsPerTask, query.per_head - segment % query.blocks * kRowsPerTask));
  };
  auto store = [&](int64_t segment, const float* by_channel) {
    const int64_t head = segment / query.blocks, row = head * query.per_head + segment % query.blocks * kRowsPerTask;
    for (int n = 0; n < rows_of(segment); ++n)
      store_row(by_channel + n * padded, view.head_dim, view.dtype, out + (row + n) * view.head_dim);
  };

  parallel(threads, segments * pieces, [&](TaskQueue& queue) {
    PieceProduct product(isa, view, p, query, rows_at_most);
    AlignedArray<float> whole(pieces > 1 ? 0 : out_size);
    for (int64_t task; (task = queue.next()) >= 0;) {
      const int64_t piece = task % pieces, segment = task / pieces;
      float* by_channel = pieces > 1 ? partials.data() + task * out_size : whole.data();
      product.run(segment / query.blocks, segment % query.blocks * kRowsPerTask, rows_of(segment),
                  piece * tiles_per_piece, std::min((piece + 1) * tiles_per_piece, tiles), by_channel);
      if (pieces == 1) store(segment, by_channel);
    }
  });
  if (pieces == 1) return;

  // Few numbers: more threads than one are worth starting only for large batches.
  const int64_t useful = segments * pieces * out_size / (1 << 19) + 1;
  parallel(static_cast<int>(std::min<int64_t>(threads, useful)), segments, [&](TaskQueue& queue) {
    for (int64_t segment; (segment = queue.next()) >= 0;) {
      float* sum = partials.data() + segment * pieces * out_size;
      const int64_t size = int64_t{rows_of(segment)} * padded;
      for (int64_t piece = 1; piece < pieces; ++piece)
        for (int64_t i = 0; i < size; ++i) sum[i] += sum[piece * out_size + i];
      store(segment, sum);
    }
  });
}

}  // namespace cute_kernels::cpu
