// Who works on what: the schedule that products and attention share.
//
// A work tile is (batch row, KV head, block of query rows). Its KV tiles are the iterations of the main loop: window
// tiles of a few dense tokens each, then the compressed tiles. The schedule lists the KV tiles of all work tiles, one
// after the other, and is partitioned into splits of equal cost, one a worker. A work tile costs something of its own
// (`Policy::work_tile_cost`), which counts before its first KV tile: without it some workers would have many short work
// tiles.
//
// Or, where that is about as even, every work tile is partitioned into as many splits (`Params::by_work_tile`), all of
// which a cluster may have (`Params::in_cluster`).
//
// Where lengths are on the device (`Params::variable_length`), so is the partition: every CTA works it out for itself, of
// the whole schedule or, by work tile, of its own work tiles alone.
#pragma once

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/schedule/cost.hpp"
#include "cute_kernels/schedule/params.hpp"

namespace cute_kernels::schedule {

inline constexpr int kMaxWorkers = 16;  // of a CTA

// Products: every work tile has the same compressed tiles, no window, and no cost of its own.
template <int kRows_>
struct ProductPolicy {
  static constexpr int kRows = kRows_;  // of a block of query rows
  static constexpr bool kUniform = true, kHasWindow = false, kTilesAreCosts = true;
  CUTE_HOST_DEVICE static constexpr int work_tile_cost(bool) { return 0; }
};

// Attention. kUniform: no lengths and no sequences, known at compile time.
template <int kRows_, bool kUniform_>
struct AttentionPolicy {
  static constexpr int kRows = kRows_;
  static constexpr bool kUniform = kUniform_, kHasWindow = true, kTilesAreCosts = false;
  CUTE_HOST_DEVICE static constexpr int work_tile_cost(bool variable_length) {
    return attention_work_tile_cost(variable_length);
  }
};

// What a worker has. By work tile, all of it is of one work tile, and this is known, too.
struct Split {
  Range tiles;
  WorkTile work_tile;
};

// Of the workers of a CTA, in shared memory.
struct CtaSplits {
  Split of_worker[kMaxWorkers];
  WorkTile of_warp[2 * kMaxWorkers];  // that a worker's warp is at, if Policy::kUniform or splits reach over work tiles
  int longest;                        // KV tiles
};

// Shared memory that a Schedule takes; the pipeline's stages may follow.
constexpr int shared_bytes(bool variable_length, int batch) {
  int row_bytes =
      variable_length ? (batch + 1) * static_cast<int>(sizeof(int)) + static_cast<int>(sizeof(Partition)) : 0;
  return (static_cast<int>(sizeof(CtaSplits)) + row_bytes + 127) / 128 * 128;
}

// What a CTA knows of the schedule.
template <class Policy>
class Schedule {
 public:
  // shared: shared_bytes of shared memory, at an address that takes no register, since work is looked up all over; null
  // for products.
  CUTE_HOST_DEVICE Schedule(Params const& params, void* shared)
      : params_(params),
        splits_(static_cast<CtaSplits*>(shared)),
        tile_ends_(static_cast<int*>(shared) + sizeof(CtaSplits) / sizeof(int)) {}

  // With all threads of the CTA: before anything else is asked for.
  CUTE_DEVICE void prepare() {
    if (!partitions_rows()) return;
    CUTE_NO_UNROLL
    for (int row = threadIdx.x; row < params_.batch; row += blockDim.x) {
      int sequence = sequence_of(row);
      tile_ends_[row + 1] = static_cast<int>(kv_tiles_of(tokens_of(sequence), window_tokens_of(sequence)));
    }
    __syncthreads();
    if (threadIdx.x < 32) add_up_tiles();
    __syncthreads();
  }

  // With all threads of the CTA: before its workers' splits are asked for.
  CUTE_DEVICE void prepare_splits() {
    if constexpr (Policy::kUniform) return;  // soon worked out
    int worker = threadIdx.x, workers = params_.workers;
    if (worker < 32) {
      int index = blockIdx.x * workers + worker;
      bool works = worker < workers;
      Split split{};
      if (params_.by_work_tile) {
        if (works) split = own_split(index);
      } else {
        if (worker <= workers) split.tiles.begin = split_begin(index);
        split.tiles.end = __shfl_down_sync(~0u, split.tiles.begin, 1);
      }
      int longest = __reduce_max_sync(~0u, works ? split.tiles.end - split.tiles.begin : 0);
      if (works) splits_->of_worker[worker] = split;
      if (worker == 0) splits_->longest = longest;
    }
    __syncthreads();
  }

  // Of the whole schedule's splits; some are empty if there are fewer KV tiles. By work tile only if Policy::kUniform.
  CUTE_HOST_DEVICE int split_begin(int split) const {
    // Without a branch where tiles are costs, of the whole schedule as of a work tile, and so soon known.
    bool of_work_tile = Policy::kTilesAreCosts || (Policy::kUniform && params_.by_work_tile);
    if (!of_work_tile) return tile_at(cost_before(split));
    int work_tile, index;
    params_.splits(work_tile, index, split);
    return work_tile * params_.partition.total + params_.partition.begin(index, params_.splits);
  }
  // By work tile, whose KV tiles need not be as many as another's; its splits may be empty.
  CUTE_HOST_DEVICE Split own_split(int split) const {
    int index, in_work_tile;
    params_.splits(index, in_work_tile, split);
    WorkTile own = make_work_tile(equal_place(index));
    int begin = own.tiles.begin, tiles = static_cast<int>(kv_tiles_of(own.tokens, own.window_tokens));
    int lead = window_lead(own.window_tokens, params_.splits.div(tiles));
    Partition partition = make_partition(tiles, params_.splits, lead);
    return {{begin + partition.begin(in_work_tile, params_.splits),
             begin + partition.begin(in_work_tile + 1, params_.splits)},
            own};
  }
  // By work tile: how many of them the CTA has splits of.
  CUTE_DEVICE int work_tiles_of_cta() const {
    int split = blockIdx.x * params_.workers;
    return params_.splits.div(split + params_.workers - 1) - params_.splits.div(split) + 1;
  }
  // By work tile, with lengths on the device: compressed tiles that the CTA presumably has of the index-th of its work
  // tiles.
  struct ExpectedTiles {
    int sequence, kv_head, first, end;
  };
  CUTE_DEVICE ExpectedTiles expected_tiles(int index) const {
    int split = blockIdx.x * params_.workers, last = split + params_.workers - 1;  // then within the work tile
    int work_tile = params_.splits.div(split) + index;
    split = max(0, split - work_tile * params_.splits.divisor);
    last = min(params_.splits.divisor - 1, last - work_tile * params_.splits.divisor);
    int row, in_row, window_tiles = static_cast<int>(window_tiles_of(params_.window_tokens));
    params_.work_tiles_per_row(row, in_row, work_tile);
    Partition const& partition = params_.partition;
    return {sequence_of(row), params_.row_blocks.div(in_row),
            max(0, partition.begin(split, params_.splits) - window_tiles), partition.begin(last + 1, params_.splits)};
  }

  CUTE_DEVICE Range split_of_worker(int worker) const {
    if constexpr (!Policy::kUniform) return splits_->of_worker[worker].tiles;
    int split = blockIdx.x * params_.workers + worker;
    return {split_begin(split), split_begin(split + 1)};
  }

  // Of a KV tile of the worker's split.
  CUTE_DEVICE WorkTile work_tile_of_worker(int worker, int tile) const {
    if constexpr (!Policy::kUniform) {
      if (by_work_tile()) return splits_->of_worker[worker].work_tile;
    }
    return work_tile_with(tile);
  }

  // What a warp of a worker looked up last: looked up again at little cost.
  CUTE_DEVICE void keep_work_tile(int warp, WorkTile const& work_tile) const {
    if ((Policy::kUniform || !by_work_tile()) && threadIdx.x % 32 == 0) splits_->of_warp[warp] = work_tile;
    __syncwarp();
  }
  CUTE_DEVICE WorkTile kept_work_tile(int worker, int warp) const {
    return !Policy::kUniform && by_work_tile() ? splits_->of_worker[worker].work_tile : splits_->of_warp[warp];
  }

  // KV tiles of any of the CTA's splits at most.
  CUTE_DEVICE int longest_split() const {
    if constexpr (!Policy::kUniform) return splits_->longest;
    return params_.longest_split;
  }

  // Of the whole schedule's splits, the one that has a KV tile of a work tile.
  CUTE_HOST_DEVICE int split_with(WorkTile const& work_tile, int tile) const {
    int cost = tile + Policy::work_tile_cost(variable_length()) * (work_tile.index + 1);
    float fraction = static_cast<float>(cost) / static_cast<float>(partition().total);
    int splits = static_cast<int>(fraction * static_cast<float>(params_.splits.divisor));
    int split = splits > 1 ? splits - 1 : 0;  // rounding moves it by less than one
    while (cost_before(split + 1) <= cost) ++split;
    return split;
  }
  // All splits that may have KV tiles of a work tile.
  CUTE_HOST_DEVICE Range splits_of(WorkTile const& work_tile) const {
    if (!Policy::kTilesAreCosts && params_.by_work_tile) {
      int splits = params_.splits.divisor;
      return {work_tile.index * splits, (work_tile.index + 1) * splits};
    }
    return {split_with(work_tile, work_tile.tiles.begin), split_with(work_tile, work_tile.tiles.end - 1) + 1};
  }
  // Of these. By work tile all do; else one without a KV tile, and without a work tile's own cost, does not.
  CUTE_HOST_DEVICE bool stores_partial(int split) const {
    return all_store_partials() || cost_before(split) < cost_before(split + 1);
  }
  // Whether every split does, without a look at each.
  CUTE_HOST_DEVICE bool all_store_partials() const {
    return Policy::kTilesAreCosts || params_.by_work_tile || partition().size > 0;
  }

  CUTE_HOST_DEVICE WorkTile work_tile(int index) const {
    Place place = equal_place(index);
    if (partitions_rows()) place_in_row(place);
    return make_work_tile(place);
  }

  // By work tile only if Policy::kUniform.
  CUTE_HOST_DEVICE WorkTile work_tile_with(int tile) const {
    Place place;
    if (variable_length()) {
      place.row = row_at(params_.work_tiles_per_row.div(tile), 0);
      int before = tile_ends_[place.row] * params_.work_tiles_per_row.divisor;
      place.in_row = (tile - before) / (tile_ends_[place.row + 1] - tile_ends_[place.row]);
      place_in_row(place);
    } else {
      int index = params_.tiles_per_work_tile.div(tile);
      params_.work_tiles_per_row(place.row, place.in_row, index);
      place.tiles = params_.tiles_per_work_tile.divisor, place.begin = index * place.tiles;
    }
    return make_work_tile(place);
  }

 private:
  Params const& params_;
  CtaSplits* splits_;
  int* tile_ends_;  // (batch + 1): KV tiles of one work tile of every row before; then the partition

  // Kernels of many rows lack the predicates to hold on to these: they look them up.
  static constexpr bool kLooksUp = Policy::kRows > 16;
  CUTE_HOST_DEVICE static bool looked_up(bool parameter) {
    uint32_t value = parameter;
#if defined(__CUDA_ARCH__)
    ptx::forget(value);
#endif
    return value;
  }
  CUTE_HOST_DEVICE bool variable_length() const {
    if constexpr (kLooksUp && !Policy::kUniform) return looked_up(params_.variable_length);
    return !Policy::kUniform && params_.variable_length;
  }
  CUTE_HOST_DEVICE bool by_work_tile() const {
    if constexpr (kLooksUp) return looked_up(params_.by_work_tile);
    return params_.by_work_tile;
  }
  // Whether the whole schedule is partitioned on the device.
  CUTE_HOST_DEVICE bool partitions_rows() const { return variable_length() && !by_work_tile(); }

  CUTE_HOST_DEVICE Partition partition() const {
    if (variable_length()) return *variable_partition();
    return params_.partition;
  }
  CUTE_HOST_DEVICE Partition* variable_partition() const {
    return reinterpret_cast<Partition*>(tile_ends_ + params_.batch + 1);
  }

  CUTE_HOST_DEVICE int cost_before(int split) const { return partition().begin(split, params_.splits); }

  // If variable_length: the row at a cost of a schedule that has one work tile of every row, each with a cost of its
  // own.
  CUTE_HOST_DEVICE int row_at(int cost, int own_cost) const {
    int low = 0, high = params_.batch;
    CUTE_NO_UNROLL
    while (high - low > 1) {
      int middle = (low + high) / 2;
      (tile_ends_[middle] + own_cost * middle <= cost ? low : high) = middle;
    }
    return low;
  }

  // The KV tile at, or the first one behind, a cost.
  CUTE_HOST_DEVICE int tile_at(int cost) const {
    int own_cost = Policy::work_tile_cost(variable_length());
    auto tile_in_work_tile = [&](int cost) { return cost > own_cost ? cost - own_cost : 0; };
    if (Policy::kTilesAreCosts) return cost;
    if (!variable_length()) {
      int work_tile, in_work_tile;
      params_.cost_per_work_tile(work_tile, in_work_tile, cost);
      return work_tile * params_.tiles_per_work_tile.divisor + tile_in_work_tile(in_work_tile);
    }
    int row = row_at(params_.work_tiles_per_row.div(cost), own_cost), first = tile_ends_[row];
    int tiles = tile_ends_[row + 1] - first, costs = tiles + own_cost;
    int in_row = cost - (first + own_cost * row) * params_.work_tiles_per_row.divisor, work_tiles = in_row / costs;
    return first * params_.work_tiles_per_row.divisor + work_tiles * tiles +
           tile_in_work_tile(in_row - work_tiles * costs);
  }

  // With one warp.
  CUTE_DEVICE void add_up_tiles() {
    int lane = threadIdx.x, sum = 0;
    if (lane == 0) tile_ends_[0] = 0;
    CUTE_NO_UNROLL
    for (int first = 0; first < params_.batch; first += 32) {
      int tiles = first + lane < params_.batch ? tile_ends_[first + lane + 1] : 0;
      CUTE_UNROLL
      for (int distance = 1; distance < 32; distance *= 2) {
        int below = __shfl_up_sync(~0u, tiles, distance);
        if (lane >= distance) tiles += below;
      }
      if (first + lane < params_.batch) tile_ends_[first + lane + 1] = sum + tiles;
      sum += __shfl_sync(~0u, tiles, 31);
    }
    if (lane > 0) return;
    Partition& partition = *variable_partition();
    int total = (sum + Policy::work_tile_cost(true) * params_.batch) * params_.work_tiles_per_row.divisor;
    partition = make_partition(total, params_.splits);
  }

  // clamped to [0, all]
  CUTE_HOST_DEVICE static int length_of(int32_t const* lengths, int sequence, int all) {
#if defined(__CUDA_ARCH__)
    return max(0, min(all, __ldg(lengths + sequence)));
#else
    return lengths[sequence] < 0 ? 0 : lengths[sequence] < all ? lengths[sequence] : all;
#endif
  }
  CUTE_HOST_DEVICE int tokens_of(int sequence) const {
    return !Policy::kUniform && params_.lengths ? length_of(params_.lengths, sequence, params_.tokens) : params_.tokens;
  }
  CUTE_HOST_DEVICE int window_tokens_of(int sequence) const {
    if constexpr (!Policy::kHasWindow) return 0;
    int all = params_.window_tokens;
    return !Policy::kUniform && all > 0 && params_.window_lengths ? length_of(params_.window_lengths, sequence, all)
                                                                  : all;
  }
  CUTE_HOST_DEVICE int sequence_of(int row) const {
    if (Policy::kUniform || !params_.sequences) return row;
#if defined(__CUDA_ARCH__)
    return __ldg(params_.sequences + row);
#else
    return params_.sequences[row];
#endif
  }

  // Of a work tile: its row and where in it, its first KV tile and how many it has.
  struct Place {
    int row, in_row, begin, tiles;
  };
  // Where rows do not differ in their tiles, or are partitioned by work tile.
  CUTE_HOST_DEVICE Place equal_place(int index) const {
    Place place;
    params_.work_tiles_per_row(place.row, place.in_row, index);
    place.tiles = params_.tiles_per_work_tile.divisor, place.begin = index * place.tiles;
    return place;
  }
  // Where rows differ in their tiles.
  CUTE_HOST_DEVICE void place_in_row(Place& place) const {
    int before = tile_ends_[place.row] * params_.work_tiles_per_row.divisor;
    place.tiles = tile_ends_[place.row + 1] - tile_ends_[place.row];
    place.begin = before + place.in_row * place.tiles;
  }

  CUTE_HOST_DEVICE WorkTile make_work_tile(Place const& place) const {
    int block;
    WorkTile work_tile;
    params_.row_blocks(work_tile.kv_head, block, place.in_row);
    work_tile.index = place.row * params_.work_tiles_per_row.divisor + place.in_row;
    work_tile.row = place.row;
    work_tile.sequence = sequence_of(place.row);
    work_tile.first_row = block * Policy::kRows;
    int rows = params_.rows - work_tile.first_row;
    work_tile.rows = rows < Policy::kRows ? rows : Policy::kRows;
    work_tile.tiles = {place.begin, place.begin + place.tiles};
    work_tile.window_tokens = window_tokens_of(work_tile.sequence);
    work_tile.window_tiles = static_cast<int>(window_tiles_of(work_tile.window_tokens));
    work_tile.tokens = tokens_of(work_tile.sequence);
    return work_tile;
  }
};

}  // namespace cute_kernels::schedule
