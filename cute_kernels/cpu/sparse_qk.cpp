// q K^T: every tile's logits are independent of every other's.
#include "cute_kernels/cpu/product_common.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kTileTokens;

constexpr int64_t kTasksPerThread = 8;   // enough for threads to finish together
constexpr int64_t kMinTilesPerTask = 4;  // below, preparing q outweighs the tiles

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

  void load(const DenseOperand& q, int group, int64_t head, int64_t first_row, int rows) {
    const uint8_t* channel_order = view_.channel_order + head * view_.padded_head_dim;
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

}  // namespace

void sparse_qk(const SparseView& view, const DenseOperand& q, float scale, void* out, DType out_dtype, int threads) {
  const Kernels& isa = kernels();
  const PairKernels* pairs = pair_kernels(isa, view);
  const ProductLayout& layout = product_layout(Role::kKey, view.padded_head_dim);
  const QueryRows query(view, q);
  const int64_t tiles = view.tiles_per_head(), segments = view.heads() * query.blocks;
  if (tiles == 0 || segments == 0) return;
  const int64_t tiles_per_task = std::clamp<int64_t>(ceil_div(segments * tiles, kTasksPerThread * std::max(threads, 1)),
                                                     std::min(kMinTilesPerTask, tiles), tiles);
  const int64_t pieces = ceil_div(tiles, tiles_per_task);

  parallel(threads, segments * pieces, [&](TaskQueue& queue) {
    TileScratch scratch(view);
    const int64_t rows_at_most = std::min<int64_t>(query.per_head, kRowsPerTask);
    QueryPanel panel(view, rows_at_most, pairs != nullptr);
    AlignedArray<float> sums(rows_at_most * kTileTokens);
    for (int64_t task; (task = queue.next()) >= 0;) {
      const int64_t piece = task % pieces, block = task / pieces % query.blocks, head = task / pieces / query.blocks;
      const int64_t first_row = block * kRowsPerTask;
      const int rows = static_cast<int>(std::min<int64_t>(kRowsPerTask, query.per_head - first_row));
      panel.load(q, query.group, head, first_row, rows);

      for (int64_t tile = piece * tiles_per_task; tile < std::min((piece + 1) * tiles_per_task, tiles); ++tile) {
        const int64_t tile_index = head * tiles + tile;
        PairedTile paired;
        if (panel.pairs() && scratch.unpack_pairs(*pairs, view, tile_index, paired)) {
          pairs->multiply_keys(paired, view.padded_head_dim, panel.pairs(), rows, sums.data());
        } else {
          const UnpackedTile unpacked = scratch.unpack(isa, view, tile_index);
          isa.multiply_keys(unpacked, view.padded_head_dim, panel.floats(), rows, sums.data());
        }

        const uint8_t* token_order = view.token_order + tile_index * kTileTokens;
        uint8_t sum_of_token[kTileTokens];
        for (int i = 0; i < kTileTokens; ++i)
          sum_of_token[token_order[layout.sum_position[i]]] = static_cast<uint8_t>(i);
        const int valid = static_cast<int>(std::min<int64_t>(kTileTokens, view.tokens - tile * kTileTokens));
        for (int n = 0; n < rows; ++n) {
          const int64_t offset = (head * query.per_head + first_row + n) * view.tokens + tile * kTileTokens;
          isa.store_logits(sums.data() + n * kTileTokens, sum_of_token, scale, valid, to_number(out_dtype),
                           const_cast<void*>(element_pointer(out, out_dtype, offset)));
        }
      }
    }
  });
}

}  // namespace cute_kernels::cpu
