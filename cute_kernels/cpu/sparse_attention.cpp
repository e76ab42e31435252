// softmax(q K^T) V in one pass over the tokens. A KV head's tokens, the compressed and those of the window, are cut
// into pieces that depend on the problem only; each piece keeps its own softmax, and the pieces are put together in
// order, so the result does not depend on how many threads there are or on their timing.
#include "cute_kernels/cpu/sparse_attention.hpp"

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "cute_kernels/cpu/attention_rows.hpp"

namespace cute_kernels::cpu {
namespace {

constexpr int64_t kTargetTasks = 256;     // for up to this many threads to be busy
constexpr int64_t kMinTilesPerPiece = 8;  // below, putting the pieces together outweighs the tiles

// The tokens that a batch row meets.
Sequence sequence_of(const Problem& problem, int row) {
  const int index = problem.sequences ? problem.sequences[row] : row;
  const SparseView& keys = problem.keys;
  if (index < 0 || index >= keys.batch)
    throw std::out_of_range("sequences[" + std::to_string(row) + "] is " + std::to_string(index) + ", there are " +
                            std::to_string(keys.batch) + " sequences");
  auto counting = [&](const int32_t* lengths, int64_t room) {
    return lengths ? std::clamp<int64_t>(lengths[index], 0, room) : room;
  };
  Sequence sequence{index, counting(problem.lengths, keys.tokens),
                    counting(problem.window.lengths, problem.window.tokens)};
  if (keys.pages.table)
    for (int64_t page = 0; page * keys.pages.tiles_per_page < sequence.compressed_tiles(); ++page)
      if (keys.pages.table[int64_t{index} * keys.pages.pages_per_sequence + page] < 0)
        throw std::invalid_argument("the page table has no page " + std::to_string(page) + " for sequence " +
                                    std::to_string(index) + " of " + std::to_string(sequence.compressed) + " tokens");
  return sequence;
}

// Puts the pieces of one query row together; sums, by channel, end in the first piece's.
void combine(const RunningSoftmax* softmax, int64_t softmax_stride, float* sums, int64_t stride, int64_t pieces,
             int channels, RunningSoftmax& whole) {
  whole = {-INFINITY, 0.f};
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const RunningSoftmax& part = softmax[piece * softmax_stride];
    if (part.max > whole.max) whole.max = part.max;
  }
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const RunningSoftmax& part = softmax[piece * softmax_stride];
    const float factor = part.max == whole.max ? 1.f : std::exp(part.max - whole.max);
    whole.sum += factor * part.sum;
    for (int i = 0; i < channels; ++i) sums[i] = factor * sums[piece * stride + i] + (piece == 0 ? 0.f : sums[i]);
  }
}

}  // namespace

void sparse_attention(const Problem& problem, int threads) {
  const Kernels& isa = kernels();
  const SparseView& keys = problem.keys;
  const int padded = keys.padded_head_dim;
  const DenseOperand q{
      problem.q, problem.q_strides[0], problem.q_strides[1], problem.q_strides[2], problem.q_heads, problem.q_tokens,
      keys.dtype};
  if (problem.batch == 0 || problem.q_heads == 0 || problem.q_tokens == 0) return;
  const QueryRows query(keys, q);

  std::vector<Sequence> sequences;
  int64_t tiles = 1;
  for (int row = 0; row < problem.batch; ++row) {
    sequences.push_back(sequence_of(problem, row));
    tiles = std::max(tiles, sequences.back().tiles());
  }
  const int64_t segments = int64_t{problem.batch} * keys.kv_heads * query.blocks;
  const int64_t tiles_per_piece =
      problem.num_splits > 0
          ? ceil_div(tiles, problem.num_splits)
          : std::max(kMinTilesPerPiece, ceil_div(tiles, std::max<int64_t>(1, kTargetTasks / segments)));
  const int64_t pieces = ceil_div(tiles, tiles_per_piece);
  const int64_t rows_at_most = std::min<int64_t>(query.per_head, kRowsPerTask), size = rows_at_most * padded;
  // (segments, pieces, rows) states, (segments, pieces, rows, padded) sums
  AlignedArray<RunningSoftmax> states(pieces > 1 ? segments * pieces * rows_at_most : 0);
  AlignedArray<float> partials(pieces > 1 ? segments * pieces * size : 0);

  auto block_of = [&](int64_t segment) {
    const int64_t head = segment / query.blocks, first_row = segment % query.blocks * kRowsPerTask;
    return RowBlock{head, first_row, static_cast<int>(std::min<int64_t>(kRowsPerTask, query.per_head - first_row))};
  };
  auto store = [&](const RowBlock& block, int n, const RunningSoftmax& softmax, float* sums) {
    const int64_t row = block.head * query.per_head + block.first_row + n;
    const bool nothing = softmax.max == -INFINITY && softmax.sum == 0.f;
    for (int i = 0; i < padded; ++i) sums[i] = nothing ? 0.f : sums[i] / softmax.sum;
    store_row(sums, keys.head_dim, keys.dtype, static_cast<uint16_t*>(problem.out) + row * keys.head_dim);
    if (problem.lse) problem.lse[row] = nothing ? -INFINITY : softmax.max + std::log(softmax.sum);
  };

  parallel(threads, segments * pieces, [&](TaskQueue& queue) {
    AttentionRows rows(isa, problem, q, query, rows_at_most);
    AlignedArray<RunningSoftmax> state(pieces > 1 ? 0 : rows_at_most);
    AlignedArray<float> sums(pieces > 1 ? 0 : size);
    for (int64_t task; (task = queue.next()) >= 0;) {
      const int64_t piece = task % pieces;
      const RowBlock block = block_of(task / pieces);
      RunningSoftmax* softmax = pieces > 1 ? states.data() + task * rows_at_most : state.data();
      float* by_channel = pieces > 1 ? partials.data() + task * size : sums.data();
      rows.run(block, sequences[block.head / keys.kv_heads], piece * tiles_per_piece, (piece + 1) * tiles_per_piece,
               softmax, by_channel);
      for (int n = 0; n < block.rows && pieces == 1; ++n) store(block, n, softmax[n], by_channel + n * padded);
    }
  });
  if (pieces == 1) return;

  // Few numbers: more threads than one are worth starting only for large batches.
  const int64_t useful = segments * pieces * size / (1 << 19) + 1;
  parallel(static_cast<int>(std::min<int64_t>(threads, useful)), segments, [&](TaskQueue& queue) {
    for (int64_t segment; (segment = queue.next()) >= 0;) {
      const RowBlock block = block_of(segment);
      for (int n = 0; n < block.rows; ++n) {
        float* sums = partials.data() + segment * pieces * size + n * padded;
        RunningSoftmax whole;
        combine(states.data() + segment * pieces * rows_at_most + n, rows_at_most, sums, size, pieces, padded, whole);
        store(block, n, whole, sums);
      }
    }
  });
}

}  // namespace cute_kernels::cpu
