// The end of sparse_av where splits reach over work tiles: a CTA adds up its workers' partials in shared memory, so that
// the second kernel reads one a CTA.
#pragma once

#include <climits>

#include "cute_kernels/reduce/policies.hpp"

namespace cute_kernels::reduce {

// With all threads of the workers, a warp each, when all have stored what they have of the work tile that their split
// ends in: worker w its partial at partials + w * stride_bytes, the work tile's index at last_work_tiles[w]. No split is
// empty. The order of the sums is fixed. Vectors of rows that a work tile lacks are added up too; nothing reads them.
template <class OutputShape>
CUTE_DEVICE void sum_in_cta(Output const& output, uint8_t const* partials, int stride_bytes, int const* last_work_tiles,
                            int workers) {
  using Partial = Sum::Partial<OutputShape>;
  auto vector_of = [&](int worker, int vector) {
    return Sum::Accumulator<OutputShape>(*reinterpret_cast<Partial const*>(partials + worker * stride_bytes), vector);
  };
  int lane = threadIdx.x % 32, mine = lane < workers ? last_work_tiles[lane] : INT_MAX;
  for (int begin = 0, end; begin < workers; begin = end) {
    int work_tile = __shfl_sync(~0u, mine, begin);
    end = __popc(__ballot_sync(~0u, mine <= work_tile));  // workers [begin, end) end in it
    Partial* to = partial<Partial>(output, blockIdx.x, work_tile);
    CUTE_NO_UNROLL
    for (int i = threadIdx.x; i < 1 << output.vectors.count_log2(OutputShape::kAtomsLog2); i += 32 * workers) {
      int vector = output.vectors[i];
      auto sum = vector_of(begin, vector);
#pragma unroll 4
      for (int worker = begin + 1; worker < end; ++worker) sum.add(vector_of(worker, vector));
      to->vectors[vector] = sum.vector;
    }
  }
}

}  // namespace cute_kernels::reduce
