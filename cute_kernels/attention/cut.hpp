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

// How a segment is cut if by_segments: tiles and units of the window are dealt to its pieces apart, both as evenly as
// can be. The longer pieces are the last of every stretch as to tiles, the first as to the window, so that a piece
// hardly ever has more of both, and the workers that begin first have the window.
struct SegmentCut {
  cutlass::FastDivmod const& pieces;
  Cut const& tiles;
  int window_units;

  // Before the index-th piece.
  CUTE_HOST_DEVICE int tiles_before(int index) const { return tiles.begin(index, pieces); }
  CUTE_HOST_DEVICE int window_units_before(int index) const {
    return pieces.div(index * window_units + pieces.divisor - 1);
  }
  CUTE_HOST_DEVICE int units_before(int index) const { return tiles_before(index) + window_units_before(index); }

  CUTE_HOST_DEVICE UnitMap unit_map(int segment_begin, int index) const {
    int first_window = segment_begin + tiles_before(index), window_end = window_units_before(index + 1);
    return {first_window, first_window + window_end, segment_begin + window_end};
  }
};

}  // namespace cute_kernels::attention
