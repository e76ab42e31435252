// What kernels with a bulk-copy ring are called with, beside the operation's own parameters.
#pragma once

#include "cute_kernels/pipeline/bulk/cluster.hpp"
#include "cute_kernels/pipeline/bulk/ring.hpp"
#include "cute_kernels/pipeline/bulk/row_offset_prefetch.hpp"

namespace cute_kernels::pipeline {

template <class OperationParams>
struct RingParams : OperationParams {
  RingShape ring;
  RowOffsetPrefetch prefetch_row_offsets;
  ClusterShape cluster;  // with splits_per_work_tile
};

template <class OperationParams>
RingParams<OperationParams> ring_params(OperationParams const& params, Stages const& stages, Config const& config) {
  RingParams<OperationParams> result{};
  static_cast<OperationParams&>(result) = params;
  result.ring = ring_shape(stages, config);
  result.cluster = cluster_shape(config);
  return result;
}

}  // namespace cute_kernels::pipeline
