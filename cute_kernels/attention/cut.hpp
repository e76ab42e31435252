// How work is cut into pieces, worked out from a few numbers on host and device alike.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/config.hpp>

namespace cute_kernels::attention {

// A number of things cut into pieces, some of them longer by one.
struct Cut {
  int all, piece, spare;

  CUTE_HOST_DEVICE int longest() const { return piece + (spare > 0); }
  // Where a piece begins; the longer ones are spread evenly.
  CUTE_HOST_DEVICE int begin(int index, cutlass::FastDivmod const& pieces) const {
    return index * piece + pieces.div(index * spare);
  }
};

// Which of a segment's units are in a piece. Those of the window come first, up to window_end. Unit u of them is the
// window's (u - first_window)-th, unit u of the others tile u - first_tile.
struct UnitMap {
  int first_window, window_end, first_tile;
};

// Places of a unit of the window beside a tile's one, if by_segments: it takes about as long as two tiles (measured,
// see profiling/NOTES.md). None where pieces are so short that one would be left without tiles.
inline int window_places(int tiles, int window_units, int pieces) {
  constexpr int kPlaces = 2;
  int most_units = (window_units + pieces - 1) / pieces;
  bool all_have_tiles = (tiles + kPlaces * window_units) / pieces > kPlaces * most_units;
  return all_have_tiles ? kPlaces : 0;
}

// How a segment is cut if by_segments: units of the window are dealt to its pieces as evenly as can be, and then tiles,
// so that places are as even as can be. The longer pieces are the last of every stretch as to places, the first as to
// the window: the workers that begin first have the window.
struct SegmentCut {
  cutlass::FastDivmod const& pieces;
  Cut const& places;
  int window_units, window_places;

  // Before the index-th piece.
  CUTE_HOST_DEVICE int tiles_before(int index) const {
    return places.begin(index, pieces) - window_places * window_units_before(index);
  }
  CUTE_HOST_DEVICE int window_units_before(int index) const {
    return pieces.div(index * window_units + pieces.divisor - 1);
  }
  CUTE_HOST_DEVICE int units_before(int index) const { return tiles_before(index) + window_units_before(index); }
  // Units of any piece at most.
  CUTE_HOST_DEVICE int longest() const { return places.longest() + (window_places ? 0 : window_units_before(1)); }

  CUTE_HOST_DEVICE UnitMap unit_map(int segment_begin, int index) const {
    int first_window = segment_begin + tiles_before(index), window_end = window_units_before(index + 1);
    return {first_window, first_window + window_end, segment_begin + window_end};
  }
};

}  // namespace cute_kernels::attention
