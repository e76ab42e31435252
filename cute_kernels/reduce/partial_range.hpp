// Which partials a work tile has.
#pragma once

#include "cute_kernels/schedule/schedule.hpp"

namespace cute_kernels::reduce {

// Of the splits [first, last]; some of them are empty unless Policy::kTilesAreCosts. After to_ctas: of those CTAs.
struct PartialRange {
  int first, last;
  bool crossing = false;  // after to_ctas: beside them, of a split that ends in a later work tile

  template <class Policy>
  CUTE_HOST_DEVICE PartialRange(schedule::Schedule<Policy> const& schedule, schedule::WorkTile const& work_tile)
      : first(schedule.split_with(work_tile, work_tile.tiles.begin)),
        last(schedule.split_with(work_tile, work_tile.tiles.end - 1)) {}

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
