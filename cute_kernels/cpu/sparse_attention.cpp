// softmax(q K^T) V in one pass over the tokens. A work tile is a KV head of a batch row and a block of its query rows.
// Its tokens, the compressed ones and those of the window, are divided into splits that depend on the problem only;
// each split has its own softmax, and the splits are combined in order, so the result does not depend on the number of
// threads or on their timing.
#include "cute_kernels/cpu/sparse_attention.hpp"

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "cute_kernels/compress/pool.hpp"
#include "cute_kernels/cpu/attention_rows.hpp"

namespace cute_kernels::cpu {
namespace {

constexpr int64_t kTargetTasks = 256;     // for up to this many threads to be busy
constexpr int64_t kMinTilesPerSplit = 8;  // below, combining the splits outweighs the tiles

// The tokens that a batch row attends to.
Sequence sequence_of(Problem const& problem, int row) {
  int const index = problem.sequences ? problem.sequences[row] : row;
  SparseView const& keys = problem.keys;
  if (index < 0 || index >= keys.batch)
    throw std::out_of_range("sequences[" + std::to_string(row) + "] is " + std::to_string(index) + ", there are " +
                            std::to_string(keys.batch) + " sequences");
  auto tokens_of = [&](int32_t const* lengths, int64_t capacity) {
    return lengths ? std::clamp<int64_t>(lengths[index], 0, capacity) : capacity;
  };
  Sequence sequence{index, tokens_of(problem.lengths, keys.tokens),
                    tokens_of(problem.window.lengths, problem.window.tokens)};
  if (keys.pages.table)
    for (int64_t page = 0; page * keys.pages.tiles_per_page < sequence.compressed_tiles(); ++page)
      if (compress::find_slot(keys, index, 0, page * keys.pages.tiles_per_page) == compress::kNoSlot)
        throw std::invalid_argument("the page table has no page " + std::to_string(page) + " for sequence " +
                                    std::to_string(index) + " of " + std::to_string(sequence.compressed) + " tokens");
  return sequence;
}

// Combines the splits of one query row; the sums, by channel, end in those of the first split.
void combine(RunningSoftmax const* softmax, int64_t softmax_stride, float* sums, int64_t stride, int64_t splits,
             int channels, RunningSoftmax& whole) {
  whole = {-INFINITY, 0.f};
  for (int64_t split = 0; split < splits; ++split) {
    RunningSoftmax const& partial = softmax[split * softmax_stride];
    if (partial.row_max > whole.row_max) whole.row_max = partial.row_max;
  }
  for (int64_t split = 0; split < splits; ++split) {
    RunningSoftmax const& partial = softmax[split * softmax_stride];
    float const factor = partial.row_max == whole.row_max ? 1.f : std::exp(partial.row_max - whole.row_max);
    whole.row_sum += factor * partial.row_sum;
    for (int i = 0; i < channels; ++i) sums[i] = factor * sums[split * stride + i] + (split == 0 ? 0.f : sums[i]);
  }
}

// Of a row of the batch, in q and in out.
schedule::QueryTokens query_tokens_of(Problem const& problem, int row) {
  if (problem.packed.starts) return problem.packed.of_row(row, problem.q_tokens);
  return {0, problem.q_tokens};
}

DenseOperand queries_of(Problem const& problem, int row) {
  schedule::QueryTokens const tokens = query_tokens_of(problem, row);
  int64_t const offset = row * problem.q_strides[0] + tokens.first * problem.q_strides[2];
  return {static_cast<uint16_t const*>(problem.q) + offset,
          0,
          problem.q_strides[1],
          problem.q_strides[2],
          problem.q_heads,
          tokens.count,
          problem.keys.dtype};
}

}  // namespace

void sparse_attention(Problem const& problem, int threads) {
  Kernels const& isa = kernels();
  SparseView const& keys = problem.keys;
  int const padded = keys.padded_head_dim, group = problem.q_heads / keys.kv_heads;
  if (problem.batch == 0 || problem.q_heads == 0 || problem.q_tokens == 0) return;

  std::vector<BatchRow> rows;
  std::vector<int64_t> first_work_tile{0};  // of every row
  int64_t tiles = 1, most_rows = 0;         // of a KV head
  for (int row = 0; row < problem.batch; ++row) {
    rows.push_back({queries_of(problem, row), sequence_of(problem, row)});
    QueryRows const query(keys, rows.back().q);
    tiles = std::max(tiles, rows.back().sequence.tiles());
    most_rows = std::max(most_rows, query.per_head);
    first_work_tile.push_back(first_work_tile.back() + keys.kv_heads * query.blocks);
  }
  int64_t const work_tiles = first_work_tile.back();
  if (work_tiles == 0) return;
  int64_t const tiles_per_split =
      problem.num_splits > 0
          ? ceil_div(tiles, problem.num_splits)
          : std::max(kMinTilesPerSplit, ceil_div(tiles, std::max<int64_t>(1, kTargetTasks / work_tiles)));
  int64_t const splits = ceil_div(tiles, tiles_per_split);
  int64_t const rows_at_most = std::min<int64_t>(most_rows, kRowsPerTask), size = rows_at_most * padded;
  // (work_tiles, splits, rows) states, (work_tiles, splits, rows, padded) sums
  AlignedArray<RunningSoftmax> states(splits > 1 ? work_tiles * splits * rows_at_most : 0);
  AlignedArray<float> partials(splits > 1 ? work_tiles * splits * size : 0);

  auto row_of = [&](int64_t work_tile) {
    return static_cast<int>(std::upper_bound(first_work_tile.begin(), first_work_tile.end(), work_tile) -
                            first_work_tile.begin() - 1);
  };
  auto block_of = [&](int64_t work_tile, int batch_row) {
    QueryRows const query(keys, rows[batch_row].q);
    int64_t const in_row = work_tile - first_work_tile[batch_row], first_row = in_row % query.blocks * kRowsPerTask;
    return RowBlock{static_cast<int>(in_row / query.blocks), first_row,
                    static_cast<int>(std::min<int64_t>(kRowsPerTask, query.per_head - first_row))};
  };
  auto output_row = [&](RowBlock const& block, int batch_row, int n) {
    int64_t const tokens = rows[batch_row].q.tokens, in_head = block.first_row + n;
    int64_t const head = int64_t{block.kv_head} * group + in_head / tokens;
    if (problem.packed.starts)
      return head * problem.packed.tokens + query_tokens_of(problem, batch_row).first + in_head % tokens;
    return (int64_t{batch_row} * problem.q_heads + head) * tokens + in_head % tokens;
  };
  auto store = [&](int64_t row, RunningSoftmax const& softmax, float* sums) {
    bool const nothing = softmax.row_max == -INFINITY && softmax.row_sum == 0.f;
    for (int i = 0; i < padded; ++i) sums[i] = nothing ? 0.f : sums[i] / softmax.row_sum;
    store_row(sums, keys.head_dim, keys.dtype, static_cast<uint16_t*>(problem.out) + row * keys.head_dim);
    if (problem.lse) problem.lse[row] = nothing ? -INFINITY : softmax.row_max + std::log(softmax.row_sum);
  };

  parallel(threads, work_tiles * splits, [&](TaskQueue& queue) {
    AttentionRows attention(isa, problem, rows_at_most);
    AlignedArray<RunningSoftmax> state(splits > 1 ? 0 : rows_at_most);
    AlignedArray<float> sums(splits > 1 ? 0 : size);
    for (int64_t task; (task = queue.next()) >= 0;) {
      int64_t const split = task % splits, work_tile = task / splits;
      int const row = row_of(work_tile);
      RowBlock const block = block_of(work_tile, row);
      RunningSoftmax* softmax = splits > 1 ? states.data() + task * rows_at_most : state.data();
      float* by_channel = splits > 1 ? partials.data() + task * size : sums.data();
      attention.run(block, rows[row], split * tiles_per_split, (split + 1) * tiles_per_split, softmax, by_channel);
      for (int n = 0; n < block.rows && splits == 1; ++n)
        store(output_row(block, row, n), softmax[n], by_channel + n * padded);
    }
  });
  if (splits == 1) return;

  // Few numbers: more threads than one are worth starting only for large batches.
  int64_t const useful = work_tiles * splits * size / (1 << 19) + 1;
  parallel(static_cast<int>(std::min<int64_t>(threads, useful)), work_tiles, [&](TaskQueue& queue) {
    for (int64_t work_tile; (work_tile = queue.next()) >= 0;) {
      int const row = row_of(work_tile);
      RowBlock const block = block_of(work_tile, row);
      for (int n = 0; n < block.rows; ++n) {
        float* sums = partials.data() + work_tile * splits * size + n * padded;
        RunningSoftmax whole;
        combine(states.data() + work_tile * splits * rows_at_most + n, rows_at_most, sums, size, splits, padded, whole);
        store(output_row(block, row, n), whole, sums);
      }
    }
  });
}

}  // namespace cute_kernels::cpu
