// How kernels are laid over a device: plans fit every device, and stages hold what they must.
#include <algorithm>
#include <random>
#include <stdexcept>

#include "check.hpp"
#include "cute_kernels/dispatch/division.hpp"
#include "cute_kernels/dispatch/heuristics.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"

using namespace cute_kernels;
using dispatch::choose_plan;

// A ring for all workers: producers divide workers and stages, and see every phase of their stages.
void check_ring(dispatch::Plan const& plan) {
  int workers = plan.config.workers, stages = plan.stages.count, producers = plan.config.producers;
  check(producers >= 1 && producers <= pipeline::kMaxProducers, "producers", producers);
  check(workers % producers == 0 && stages % producers == 0, "producers divide workers and stages", workers, stages);
  check(stages >= workers, "a stage for every worker", workers, stages);
}

// Each producer has as many tiles in flight: one or two at first, later no fewer, and about kBytesInFlight of them all.
void check_in_flight(dispatch::Plan const& plan, format::Role role, int head_dim, int longest_split) {
  auto [first, later] = dispatch::tiles_in_flight(plan, role, head_dim, longest_split);
  int stages = plan.stages.count, producers = plan.config.producers;
  if (producers == 0) return void(check(first == 0 && later == 0, "nothing is in flight without producers"));
  check(first == producers || first == 2 * producers, "tiles in flight at first", first, producers);
  check(later >= 0 && later < stages && later % producers == 0, "tiles in flight later", later, stages);
  check(later == 0 || first <= later, "no more at first than later", first, later);
  int bytes = plan.stages.stage_bytes, most = std::max(first * bytes, dispatch::kBytesInFlight + producers * bytes / 2);
  int in_flight = later == 0 ? stages : later;
  check(in_flight * bytes <= most, "no more bytes in flight later", in_flight, bytes);
  check(later == 0 || (later + producers) * bytes > dispatch::kBytesInFlight, "nor far fewer", later, bytes);
  int with_more = dispatch::tiles_in_flight(plan, role, head_dim, longest_split + 1).first;
  check(first <= with_more, "no fewer at first where splits are longer", first, with_more);
}

// So many stages ahead as are asked for, or an error. fit: stages that shared memory can hold.
template <class F>
void check_tuned(pipeline::KernelLimits const& kernel, F&& plan_with, int fit, int ahead) {
  int most = std::min(fit, kernel.max_stages);
  try {
    dispatch::Plan plan = plan_with(ahead);
    int workers = plan.config.workers, stages = plan.stages.count, producers = plan.config.producers;
    check(ahead < most, "no plan has more stages than fit", ahead, most);
    check(workers >= 1 && workers <= kernel.max_workers, "workers of a tuned plan", workers);
    if (!kernel.one_ring) {
      check(stages == ahead + 1 && stages * workers <= fit, "stages of a worker", stages, ahead);
      return;
    }
    check_ring(plan);
    check(stages <= most && stages <= workers + ahead && stages > workers + ahead - producers, "stages of a tuned ring",
          stages, ahead);
  } catch (std::runtime_error const&) {
    check(ahead >= most, "stages that fit can be had", ahead, most);
  }
}

// A partition in clusters is about as even, and gives every cluster whole work tiles.
void check_in_clusters(DeviceLimits const& device, pipeline::Config config, int work_tiles, int tiles_per_work_tile) {
  auto ceil_div = [](int a, int b) { return (a + b - 1) / b; };
  int tiles = work_tiles * tiles_per_work_tile, longest = ceil_div(tiles, config.ctas * config.workers);
  int of_a_cta = ceil_div(tiles, config.ctas);
  bool done = dispatch::partition_in_clusters(device, work_tiles, tiles_per_work_tile,
                                              int64_t{work_tiles} * tiles_per_work_tile, config);
  check(done == config.in_cluster && done == (config.splits_per_work_tile > 0), "it says what it did");
  check(config.cluster >= 1 && config.cluster <= kMaxCluster, "cluster", config.cluster);
  if (config.splits_per_work_tile == 0) return void(check(config.cluster == 1, "no clusters without splits"));
  int splits = config.splits_per_work_tile;
  check(splits * work_tiles == config.ctas * config.workers, "a split for every worker", splits, config.ctas);
  check(ceil_div(tiles_per_work_tile, splits) <= longest + 1, "splits are longer by a tile at most", splits, longest);
  check(ceil_div(tiles, config.ctas) <= of_a_cta + dispatch::kTilesOfCombine, "a CTA has few tiles more", config.ctas);
  check(config.cluster * config.workers % splits == 0, "clusters have whole work tiles", splits, config.cluster);
  check(config.cluster == 1 || config.cluster * config.workers == splits, "a cluster has one work tile", splits);
  int clusters = config.cluster > 1 ? device.max_clusters[config.cluster] : device.multiprocessors;
  check(config.ctas % config.cluster == 0 && config.ctas / config.cluster <= clusters, "clusters fit", config.ctas);
}

// What is chosen for attention fits the device and has a split for every worker; nothing else is estimated to be faster
// than a partition of the whole schedule, which every call can have.
void check_division(DeviceLimits const& device, dispatch::Work const& work) {
  dispatch::Division chosen = dispatch::choose_division(device, work);
  int workers = chosen.workers, ctas = chosen.ctas, cluster = chosen.cluster, splits = chosen.splits_per_work_tile;
  check(workers >= 1 && workers <= work.most_workers, "workers of a division", workers);
  check(cluster >= 1 && cluster <= kMaxCluster && ctas % cluster == 0, "whole clusters", ctas, cluster);
  int clusters = cluster > 1 ? device.max_clusters[cluster] : device.multiprocessors;
  check(ctas >= 1 && ctas / cluster <= clusters, "clusters run at a time", ctas, cluster);
  check(chosen.in_cluster || cluster == 1, "clusters combine", cluster);
  check(!chosen.in_cluster || (splits > 0 && cluster * workers % splits == 0), "clusters have whole work tiles",
        splits);
  check(cluster == 1 || cluster * workers == splits, "a cluster has one work tile", splits);
  check(splits == 0 || int64_t{splits} * work.work_tiles == int64_t{ctas} * workers, "a split for every worker",
        splits);
  check(chosen.in_cluster || splits <= work.longest, "a KV tile for every split beside the second kernel", splits);
  dispatch::Division whole{work.most_workers, static_cast<int>(std::min<int64_t>(device.multiprocessors, work.tiles)),
                           1, 0, false};
  check(dispatch::estimated_time(work, chosen) <= dispatch::estimated_time(work, whole), "no slower by estimate");
}

int main() {
  std::mt19937 random(std::random_device{}());
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  DeviceLimits const devices[] = {
      {132, 232448, 9, 0, true, {0, 0, 66, 43, 30, 25, 20, 15, 15, 13, 8, 7, 7, 7, 7, 7, 7}},
      {108, 166912, 8, 0, false},
      {84, 101376, 8, 6, false}};
  for (int i = 0; i < 500; ++i) {
    int heads = draw(1, 12), row_blocks = draw(1, 3), tiles_per_head = draw(1, 60);
    int64_t tiles = int64_t{heads} * row_blocks * tiles_per_head;
    for (DeviceLimits const& device : devices) {
      int head_dim = 64 << draw(0, 2), n = draw(0, 1) ? 8 : 16, longest = draw(0, head_dim),
          row_bytes = draw(0, 1) ? 272 : 0;
      bool one_ring = draw(0, 1);
      pipeline::KernelLimits kernel{};
      kernel.max_workers = 4 * draw(1, 4);
      kernel.worker_warps = draw(0, 1) ? 1 : 4;
      kernel.min_stages = 2;
      kernel.max_stages = one_ring ? 48 : draw(3, 8);
      kernel.min_block_bytes = n * 64 * 4;
      kernel.fixed_shared_bytes = 64;
      kernel.one_ring = one_ring;
      kernel.stages_ahead = draw(2, 16);
      kernel.whole_steps = draw(0, 1);
      kernel.combines_in_cluster = one_ring;
      int rows = draw(1, 40);
      auto plan_with = [&](int stages_ahead) {
        return choose_plan(device, kernel, n, rows, format::BitmapTile::tile_rows(head_dim, longest), 64, row_bytes,
                           tiles, {stages_ahead});
      };
      auto plan = plan_with(0);
      int stage_bytes = plan.stages.stage_bytes, workers = plan.config.workers;
      check_tuned(kernel, plan_with, (device.shared_bytes - kernel.fixed_shared_bytes) / stage_bytes, draw(1, 50));
      check(workers >= 1 && workers <= kernel.max_workers, "workers", workers);
      check(plan.stages.count >= (one_ring ? 1 : 2) && plan.stages.count <= kernel.max_stages, "stages",
            plan.stages.count);
      int stages = one_ring ? plan.stages.count : workers * plan.stages.count;
      check(stages * stage_bytes + kernel.fixed_shared_bytes <= device.shared_bytes, "shared memory", stage_bytes);
      if (one_ring) check_ring(plan);
      check_in_flight(plan, draw(0, 1) ? format::Role::kKey : format::Role::kValue, head_dim, draw(1, 9));
      check(plan.stages.block_bytes >= format::BitmapTile::tile_rows(head_dim, longest) * format::kRowBytes,
            "a stage holds the longest block");
      check(stage_bytes - plan.stages.block_bytes >= kernel.rows_behind * format::kRowBytes,
            "and the rows behind it that decoders may read");
      check(plan.stages.block_bytes % 128 == 0 && stage_bytes % 128 == 0, "stages are aligned");
      check(plan.config.ctas <= device.multiprocessors, "one CTA an SM", plan.config.ctas);
      int step = dispatch::kSchedulers / kernel.worker_warps;
      check(int64_t{plan.config.ctas} * workers <= tiles, "a tile for every worker", workers);
      check(plan.config.ctas == std::min<int64_t>(device.multiprocessors, tiles), "as many CTAs as have tiles");
      check(!kernel.whole_steps || workers <= pipeline::kMaxProducers || workers % step == 0, "workers come in steps",
            workers, step);
      if (one_ring) check_in_clusters(device, plan.config, heads * row_blocks, tiles_per_head);
      if (one_ring)
        check_division(device, {heads * row_blocks, tiles_per_head, tiles, draw(1, 64) * 32, head_dim, n, workers,
                                32 * kernel.worker_warps, draw(0, 1) == 1});
    }
  }
  return report();
}
