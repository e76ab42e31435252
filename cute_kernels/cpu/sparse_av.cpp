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
        slots_(static_cast<int>(layout_.token.size())),
        entries_(static_cast<int>(layout_.channel.size())),
        parts_(p.dtype == DType::kBFloat16 ? 1 : 2),
        scratch_(view),
        patterns_(rows_at_most * slots_),
        pair_patterns_(pairs_ ? rows_at_most * parts_ * slots_ / kStreams : 0),
        float_sums_(pairs_ ? rows_at_most * entries_ : 0) {
    for (int i = 0; i < slots_ / kStreams; ++i)
      for (int s = 0; s < kStreams; ++s) pair_token_.push_back(layout_.token[(i / 4 * kStreams + s) * 4 + i % 4]);
  }

  // sums (rows, entries of a tile), in the order of `entry`: overwritten.
  void run(int64_t head, int64_t first_row, int rows, int64_t first_tile, int64_t last_tile, float* sums) {
    head_ = head, first_row_ = first_row, rows_ = rows;
    bool any_floats = false;
    std::fill_n(sums, rows * entries_, 0.f);
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      PairedTile paired;
      const int64_t tile_index = head * view_.tiles_per_head() + tile;
      if (pairs_ && make_pair_patterns(tile) && scratch_.unpack_pairs(*pairs_, view_, tile_index, paired)) {
        pairs_->multiply_values(paired, view_.padded_head_dim, pair_patterns_.data(), parts_, rows, sums);
        continue;
      }
      for (int n = 0; n < rows; ++n)
        isa_.make_patterns(weights(tile, n), layout_.token.data(), patterns_.data() + n * slots_);
      const UnpackedTile unpacked = scratch_.unpack(isa_, view_, tile_index);
      if (pairs_ && !any_floats) std::fill_n(float_sums_.data(), rows * entries_, 0.f);
      any_floats = true;
      isa_.multiply_values(unpacked, view_.padded_head_dim, patterns_.data(), rows, pairs_ ? float_sums_.data() : sums);
    }
    if (pairs_ && any_floats)
      for (int n = 0; n < rows; ++n)
        for (int i = 0; i < entries_; ++i) sums[n * entries_ + i] += float_sums_[n * entries_ + entry(i)];
  }

  // The sums of a head by channel: each channel is the sum of the entries that hold it. out (rows, padded_head_dim).
  void collect(int64_t head, int rows, const float* sums, float* out) const {
    const uint8_t* channel_order = view_.channel_order + head * view_.padded_head_dim;
    std::fill_n(out, int64_t{rows} * view_.padded_head_dim, 0.f);
    for (int n = 0; n < rows; ++n, sums += entries_, out += view_.padded_head_dim)
      for (int i = 0; i < entries_; ++i) out[channel_order[layout_.channel[entry(i)]]] += sums[i];
  }

  static int64_t sums_size(const SparseView& view, int64_t rows) {
    return rows * static_cast<int64_t>(product_layout(Role::kValue, view.padded_head_dim).channel.size());
  }

 private:
  WeightRow weights(int64_t tile, int n) const {
    const int64_t offset = row_offset(view_, p_, query_.group, head_, first_row_ + n) + tile * kTileTokens;
    const int valid = static_cast<int>(std::min<int64_t>(kTileTokens, view_.tokens - tile * kTileTokens));
    return {element_pointer(p_.data, p_.dtype, offset), to_number(p_.dtype), valid,
            view_.token_order + (head_ * view_.tiles_per_head() + tile) * kTileTokens};
  }

  bool make_pair_patterns(int64_t tile) {
    const int row_size = parts_ * slots_ / kStreams;
    for (int n = 0; n < rows_; ++n)
      if (!pairs_->make_patterns(weights(tile, n), pair_token_.data(), parts_, pair_patterns_.data() + n * row_size))
        return false;
    return true;
  }

  // Place in the sums -> [row][entry].
  int entry(int i) const { return pairs_ ? i / kPairBlock * kPairBlock + pair_slot_entry(i % kPairBlock) : i; }

  const Kernels& isa_;
  const PairKernels* pairs_;
  const SparseView& view_;
  const DenseOperand& p_;
  const QueryRows& query_;
  const ProductLayout& layout_;
  int slots_, entries_, parts_;
  TileScratch scratch_;
  AlignedArray<float> patterns_;
  AlignedArray<uint32_t> pair_patterns_;
  AlignedArray<float> float_sums_;  // of tiles that are none for pairs
  std::vector<uint8_t> pair_token_;  // [c][column][4][stream] -> token_position
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
  const int64_t sums_size = PieceProduct::sums_size(view, rows_at_most);
  AlignedArray<float> partials(pieces > 1 ? segments * pieces * sums_size : 0);  // (segments, pieces, rows, entries)

  auto rows_of = [&](int64_t segment) {
    return static_cast<int>(std::min<int64_t>(kRowsPerTask, query.per_head - segment % query.blocks * kRowsPerTask));
  };
  auto store = [&](const PieceProduct& product, int64_t segment, const float* sums, float* by_channel) {
    const int64_t head = segment / query.blocks, row = head * query.per_head + segment % query.blocks * kRowsPerTask;
    product.collect(head, rows_of(segment), sums, by_channel);
    for (int n = 0; n < rows_of(segment); ++n)
      store_row(by_channel + n * padded, view.head_dim, view.dtype, out + (row + n) * view.head_dim);
  };

  parallel(threads, segments * pieces, [&](TaskQueue& queue) {
    PieceProduct product(isa, view, p, query, rows_at_most);
    AlignedArray<float> whole(pieces > 1 ? 0 : sums_size), by_channel(pieces > 1 ? 0 : rows_at_most * padded);
    for (int64_t task; (task = queue.next()) >= 0;) {
      const int64_t piece = task % pieces, segment = task / pieces;
      float* sums = pieces > 1 ? partials.data() + task * sums_size : whole.data();
      product.run(segment / query.blocks, segment % query.blocks * kRowsPerTask, rows_of(segment),
                  piece * tiles_per_piece, std::min((piece + 1) * tiles_per_piece, tiles), sums);
      if (pieces == 1) store(product, segment, sums, by_channel.data());
    }
  });
  if (pieces == 1) return;

  // Few numbers: more threads than one are worth starting only for large batches.
  const int64_t useful = segments * pieces * sums_size / (1 << 19) + 1;
  parallel(static_cast<int>(std::min<int64_t>(threads, useful)), segments, [&](TaskQueue& queue) {
    PieceProduct product(isa, view, p, query, 0);
    AlignedArray<float> by_channel(rows_at_most * padded);
    for (int64_t segment; (segment = queue.next()) >= 0;) {
      float* sum = partials.data() + segment * pieces * sums_size;
      const int64_t size = PieceProduct::sums_size(view, rows_of(segment));
      for (int64_t piece = 1; piece < pieces; ++piece)
        for (int64_t i = 0; i < size; ++i) sum[i] += sum[piece * sums_size + i];
      store(product, segment, sum, by_channel.data());
    }
  });
}

}  // namespace cute_kernels::cpu
