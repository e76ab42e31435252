// What a measurement sets by hand in place of the choices of heuristics.hpp.
#pragma once

namespace cute_kernels::dispatch {

struct Tuning {
  // The depth of the pipeline: stages beyond those that are read, of every worker, or of all workers together where
  // they share a ring, whose stages are rounded down to a multiple of its producers. 0: as chosen.
  int stages_ahead = 0;
};

}  // namespace cute_kernels::dispatch
