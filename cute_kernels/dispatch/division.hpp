// How attention's work is dealt to CTAs, clusters and workers: of all ways that fit a device, the one that takes the
// least time by an estimate. Host code that tests call without a GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cute_kernels/common/device.hpp"
#include "cute_kernels/dispatch/heuristics.hpp"

namespace cute_kernels::dispatch {

// Work tiles that are about equal.
struct Work {
  int work_tiles;
  int longest;    // KV tiles of the longest
  int64_t tiles;  // KV tiles of all of them
  int vectors;    // that a work tile's result is written in
  int padded_head_dim;
  int rows;          // query rows that the kernel multiplies
  int most_workers;  // of a CTA
  int worker_threads;
  bool variable_length;  // see schedule::Params
};

// See pipeline::Config.
struct Division {
  int workers, ctas, cluster, splits_per_work_tile;
  bool in_cluster;
};

// What takes time, beside what all divisions share, in microseconds: fitted to calls with a cold cache on an H200.
namespace cost {
// A KV tile's share of a busy SM.
inline float tile(int padded_head_dim, int rows) {
  return std::max(0.26f, 0.003f * static_cast<float>(padded_head_dim)) * (1 + 0.012f * static_cast<float>(rows - 8));
}
inline constexpr float kLatency = 2.3f;  // of such shares: from a worker's tile to its next one at least
// How much the longest split counts where other workers of its CTA have shorter ones.
inline constexpr float kUneven = 0.35f;
// Fewer workers than a CTA may have take longer for tiles beyond the first ones: as if a CTA had so many more.
inline float more_tiles(Work const& work, float workers, float of_cta) {
  constexpr float kFirst = 20;
  float missing = static_cast<float>(work.most_workers) / workers - 1;
  return (work.padded_head_dim < 128 ? 0.45f : 0.21f) * missing * std::sqrt(missing) * std::max(0.f, of_cta - kFirst);
}
// Barriers of a cluster, for each of its CTAs, and for more than every device can have in one.
inline constexpr int kPortableCluster = 8;
inline constexpr float kCluster = 0.27f, kClusterCta = 0.06f, kLargeCluster = 0.4f;
inline constexpr float kWrite = 0.65f;  // results: a value of every thread
// The same of more rows (reduce/cluster_rows.hpp): the weights of a work tile's splits, and a vector of every thread.
inline constexpr int kFewRows = 16;
inline constexpr float kWeigh = 0.6f, kWriteVector = 0.35f;
inline constexpr float kFarCode = 0.4f;   // with variable lengths the code of a cluster's end is not fetched ahead
inline constexpr float kCombine = 1.9f;   // the second kernel,
inline constexpr float kPartial = 8e-6f;  // for every vector that it reads,
inline constexpr float kWave = 0.7f;      // and for each time that its CTAs fill the device, after the first
inline constexpr float kWholeSchedule = 0.6f, kVariableSchedule = 0.95f;  // splits that reach over work tiles
}  // namespace cost

inline float estimated_time(Work const& work, Division const& division) {
  auto ceil_div = [](float a, float b) { return static_cast<float>(static_cast<int>((a + b - 1) / b)); };
  float workers = static_cast<float>(division.workers), splits = static_cast<float>(division.splits_per_work_tile);
  float ctas = static_cast<float>(division.ctas), cluster = static_cast<float>(division.cluster);
  float longest = static_cast<float>(work.longest), tiles = static_cast<float>(work.tiles);
  float vectors = static_cast<float>(work.vectors);
  float of_split = splits > 0 ? ceil_div(longest, splits) : ceil_div(tiles, ctas * workers);
  float of_cta = splits > 0 ? longest * workers / splits : tiles / ctas;
  float uneven = of_split * std::max(cost::kLatency, workers),
        even = std::max(of_split * cost::kLatency, of_cta + cost::more_tiles(work, workers, of_cta));
  float time = cost::tile(work.padded_head_dim, work.rows) * (cost::kUneven * uneven + (1 - cost::kUneven) * even);
  constexpr float kLanes = 4;  // that write a vector
  if (division.in_cluster) {
    float threads = workers * static_cast<float>(work.worker_threads);
    float own = std::max(1.f, workers / splits);  // work tiles of a CTA
    if (work.rows > cost::kFewRows)
      time += own * (cost::kWeigh + cost::kWriteVector * ceil_div(ceil_div(vectors, cluster), threads));
    else
      time += cost::kWrite * ceil_div(own * ceil_div(vectors, cluster) * kLanes, threads);
    if (cluster > 1) time += cost::kCluster + cost::kClusterCta * cluster;
    if (cluster > cost::kPortableCluster) time += cost::kLargeCluster;
    return work.variable_length ? time + cost::kFarCode : time;
  }
  constexpr float kThreads = 512;  // of the second kernel on an SM
  float waves = static_cast<float>(work.work_tiles) * vectors * kLanes / (kThreads * ctas);
  time += cost::kCombine + cost::kPartial * ctas * workers * vectors + cost::kWave * std::max(0.f, waves - 1);
  if (splits > 0) return time;
  return time + cost::kWholeSchedule + (work.variable_length ? cost::kVariableSchedule : 0);
}

// Of a kernel that combines partials in clusters.
inline Division choose_division(DeviceLimits const& device, Work const& work) {
  Division best{};
  float least = 0;
  auto consider = [&](Division const& division) {
    float time = estimated_time(work, division);
    if (best.workers == 0 || time < least) best = division, least = time;
  };
  int sms = device.multiprocessors, all = work.work_tiles;
  for (int workers = work.most_workers; workers > 0; workers -= workers > kSchedulers / 2 ? kSchedulers / 2 : 1) {
    for (int cluster = kMaxCluster; cluster > 1; --cluster)
      if (all <= device.max_clusters[cluster]) consider({workers, all * cluster, cluster, workers * cluster, true});
    for (int own = 1; own <= workers; ++own)  // work tiles of a CTA
      if (workers % own == 0 && all % own == 0 && all / own <= sms)
        consider({workers, all / own, 1, workers / own, true});
    // As many splits of every work tile as there are workers for, then as CTAs have to themselves.
    int most = sms * workers / all;
    for (int splits : {most, most / workers * workers}) {
      splits = std::min(splits, work.longest);
      while (splits > 0 && all * splits % workers != 0) --splits;
      if (splits > 0) consider({workers, all * splits / workers, 1, splits, false});
    }
    consider({workers, static_cast<int>(std::min<int64_t>(sms, work.tiles)), 1, 0, false});
  }
  return best;
}

}  // namespace cute_kernels::dispatch
