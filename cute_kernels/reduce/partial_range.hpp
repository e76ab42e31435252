// Which partials a work tile has.
#pragma once

#include "cute_kernels/schedule/schedule.hpp"

namespace cute_kernels::reduce {

// Of the splits [first, last], those that store one. After to_ctas: of those CTAs.
struct PartialRange {
  int first, last;
  bool crossing = false;  // after to_ctas: beside them, of a split that ends in a later work tile

  template <class Policy>
  CUTE_HOST_DEVICE PartialRange(schedule::Schedule<Policy> const& schedule, schedule::WorkTile const& work_tile) {
    schedule::Range splits = schedule.splits_of(work_tile);
    first = splits.begin, last = splits.end - 1;
  }

  // Where CTAs have added up the partials of their splits that end in the work tile.
  template <class Policy>
  CUTE_HOST_DEVICE void to_ctas(schedule::Schedule<Policy> const& schedule, schedule::WorkTile const& work_tile,
                                int splits_per_cta) {
    crossing = schedule.split_begin(last + 1) > work_tile.tiles.end;
    bool alone = crossing && first == last;
    first /= splits_per_cta;
    last = alone ? first - 1 : (last - crossing) / splits_per_cta;
  }
};

}  // namespace cute_kernels::reduce
