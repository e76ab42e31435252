// What kernels with a bulk-copy ring are called with, beside the operation's own parameters.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_kernels/pipeline/bulk/cluster.hpp"
#include "cute_kernels/pipeline/bulk/ring.hpp"
#include "cute_kernels/pipeline/bulk/row_offset_prefetch.hpp"

namespace cute_kernels::pipeline {

// OperationParams: with `schedule`.
template <class OperationParams>
struct RingParams : OperationParams {
  RingShape ring;
  RowOffsetPrefetch prefetch_row_offsets;
  ClusterShape cluster;   // with splits_per_work_tile
  uint64_t cache_policy;  // of tiles
};

template <class OperationParams>
RingParams<OperationParams> ring_params(OperationParams const& params, Stages const& stages, Config const& config) {
  RingParams<OperationParams> result{};
  static_cast<OperationParams&>(result) = params;
  result.ring = ring_shape(stages, config);
  result.cluster = cluster_shape(config);
  using cute::TMA::CacheHintSm90;
  bool read_once = params.schedule.row_blocks.divisor == 1;
  result.cache_policy = static_cast<uint64_t>(read_once ? CacheHintSm90::EVICT_FIRST : CacheHintSm90::EVICT_NORMAL);
  return result;
}

}  // namespace cute_kernels::pipeline
