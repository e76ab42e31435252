// What a CTA has: a block of query rows of a KV head, and a split of the tokens that they see.
#pragma once

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/ops/attention/prefill/params.hpp"

namespace cute_kernels::attention::prefill {

// Of the dense window or of the compressed tokens.
struct KvTile {
  bool in_window;
  int first_token;
};

// How much longer a CTA takes to begin with the window than with compressed tokens, in KV tiles, as measured.
inline constexpr int kWindowDelayTiles = 4;

// The query rows of a KV head: its group's query heads, one after the other, with all query tokens of the batch row.
struct QueryRows {
  int first_token, tokens;  // in q and out
  int rows;

  CUTE_DEVICE QueryRows(Params const& params, int batch_row) {
    schedule::QueryTokens of_row{0, params.q_tokens};
    if (params.packed.starts) of_row = params.packed.of_row(batch_row, params.q_tokens);
    first_token = of_row.first, tokens = of_row.count, rows = params.group * tokens;
  }

  CUTE_DEVICE void find(Params const& params, int row, int& head, int& token) const {
    if (!params.packed.starts) return params.query_tokens(head, token, row);
    // A quotient below 2^22, off by one at most: less code than a division.
    head = static_cast<int>(static_cast<float>(row) * ptx::reciprocal_approximate(static_cast<float>(tokens)));
    token = row - head * tokens;
    if (token < 0) --head, token += tokens;
    if (token >= tokens) ++head, token -= tokens;
  }
};

class WorkTile {
 public:
  int row, sequence, kv_head;  // of the batch, where its tokens are stored
  int first_row, rows;         // of the KV head's query rows; none in a cluster's last CTA, perhaps
  int split;
  int tokens, window_tokens;  // that count
  int begin, end;             // its KV tiles: those of the window come first

  // Of this CTA, with all lanes of a warp. rows_of_cta: its most query rows; cluster_ctas: CTAs that have the same KV tiles.
  CUTE_DEVICE static WorkTile look_up(Params const& params, int rows_of_cta, int cluster_ctas) {
    WorkTile found;
    int head, block, of_head, cta = blockIdx.x % cluster_ctas;
    params.splits(of_head, found.split, blockIdx.x / cluster_ctas);
    params.row_blocks(head, block, of_head);
    params.kv_heads(found.row, found.kv_head, head);
    block = params.row_blocks.divisor - 1 - block;  // with causality, those that see most come first
    QueryRows queries = found.queries(params);
    int cluster_row = block * cluster_ctas * rows_of_cta;
    found.first_row = cluster_row + cta * rows_of_cta;
    found.rows = max(0, min(rows_of_cta, queries.rows - found.first_row));
    int cluster_rows = min(cluster_ctas * rows_of_cta, queries.rows - cluster_row);
    found.of_absent_rows_ = cluster_rows <= 0;
    if (found.of_absent_rows_) return found;
    found.sequence = params.sequences ? __ldg(params.sequences + found.row) : found.row;
    found.tokens = found.length(params.lengths, static_cast<int>(params.keys.tokens));
    found.window_tokens = params.window.tokens > 0 ? found.length(params.window.lengths, params.window.tokens) : 0;
    found.share_out(params, queries, cluster_row, cluster_rows);
    return found;
  }

  CUTE_DEVICE KvTile kv_tile(int index) const {
    int compressed = index - window_tiles_;
    return compressed < 0 ? KvTile{true, index * format::kTileTokens} : KvTile{false, compressed * format::kTileTokens};
  }

  // Whether no CTA of the cluster has a query row: where batch rows differ in their number. Nothing else is known then.
  CUTE_DEVICE bool of_absent_rows() const { return of_absent_rows_; }

  // Of the window, from the split's first on: may be negative, and more than the split has.
  CUTE_DEVICE int window_tiles() const { return window_tiles_ - begin; }

  // Looked up again rather than held on to.
  CUTE_DEVICE QueryRows queries(Params const& params) const { return {params, row}; }

  // Tokens of the window, or of the compressed ones, that a query token sees.
  CUTE_DEVICE int seen(Params const& params, QueryRows const& queries, int query_token, bool in_window) const {
    int of_window = window_tokens - (params.causal ? queries.tokens - 1 - query_token : 0);
    return max(0, in_window ? of_window : tokens + min(0, of_window));
  }
  // Every query row sees all of the KV tiles from this one up to that index.
  CUTE_DEVICE int all_seen_until(int index) const {
    return index < window_tiles_ ? full_window_tiles_ : first_cut_tile();
  }
  // The first compressed tile of which a query row does not see all.
  CUTE_DEVICE int first_cut_tile() const { return window_tiles_ + full_tiles_; }

  // Of the KV head, for a row of the work tile; for those beyond the last that one.
  CUTE_DEVICE int query_row(QueryRows const& queries, int row_of_work_tile) const {
    return min(first_row + row_of_work_tile, queries.rows - 1);
  }

  // Of a row of the work tile, in out and lse.
  CUTE_DEVICE int64_t output_row(Params const& params, int row_of_work_tile) const {
    int query_row = first_row + row_of_work_tile;
    if (!params.packed.starts) return (int64_t{row} * params.kv_heads.divisor + kv_head) * params.rows + query_row;
    QueryRows of_row = queries(params);
    int head, token;
    of_row.find(params, query_row, head, token);
    return (int64_t{kv_head} * params.group + head) * params.packed.tokens + of_row.first_token + token;
  }

 private:
  bool of_absent_rows_;
  int window_tiles_, full_window_tiles_, full_tiles_;

  // KV tiles among splits. What the oldest and the newest query token see, of compressed tokens and of the window, lanes 0
  // to 3 find out side by side: little code, for what has not run yet takes longer to arrive than to run.
  CUTE_DEVICE void share_out(Params const& params, QueryRows const& queries, int cluster_row, int cluster_rows) {
    unsigned lane = threadIdx.x % 32;
    bool of_newest = lane & 1, of_window = lane & 2;
    int head, token;
    queries.find(params, of_newest ? cluster_row + cluster_rows - 1 : cluster_row, head, token);
    bool one_head = head == __shfl_xor_sync(~0u, head, 1);
    if (!one_head) token = of_newest ? queries.tokens - 1 : 0;
    int of_lane = seen(params, queries, token, of_window);
    full_tiles_ = __shfl_sync(~0u, of_lane, 0) / format::kTileTokens;
    full_window_tiles_ = __shfl_sync(~0u, of_lane, 2) / format::kTileTokens;
    window_tiles_ = tiles_of(__shfl_sync(~0u, of_lane, 3));
    int tiles = window_tiles_ + tiles_of(__shfl_sync(~0u, of_lane, 1));
    int of_each, left;  // the first splits have one of those left over
    params.splits(of_each, left, tiles);
    // The first split, which begins with the window, has up to so many fewer.
    int late = window_tiles_ > 0 ? max(0, min(kWindowDelayTiles, of_each - 1)) : 0;
    params.splits(of_each, left, tiles + late);
    begin = max(0, split * of_each + min(split, left) - late);
    end = (split + 1) * of_each + min(split + 1, left) - late;
  }

  CUTE_DEVICE static int tiles_of(int tokens) { return (tokens + format::kTileTokens - 1) / format::kTileTokens; }
  CUTE_DEVICE int length(int32_t const* lengths, int all) const {
    return lengths ? max(0, min(all, __ldg(lengths + sequence))) : all;
  }
};

}  // namespace cute_kernels::attention::prefill
