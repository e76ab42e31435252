// The line of work: units, segment after segment, cut into equal pieces, one a worker. A segment takes time of its own,
// which counts as some units before its first: some workers would have many short ones, or two in place of one. So a
// line has places, those of segments and those of units, of which a piece has consecutive ones.
//
// Or, where that is about as even, every segment is cut into as many pieces (`Params::by_segments`), so that a cluster
// has all of them; its window is spread over them.
//
// A segment is (row of q, KV head, block of N query rows). Its units are a few tokens of its window each, then the
// tiles of its compressed tokens; one that has neither has one unit all the same, so that its result is written. Where
// lengths are on the device, so is the partition: every CTA works it out for itself.
#pragma once

#include "cute_kernels/attention/params.hpp"

namespace cute_kernels::attention {

inline constexpr int kUnitTokens = format::kTileTokens;
inline constexpr int kWindowUnitTokens = 32;  // dense ones
inline constexpr int kMaxWorkers = 14;        // by the barriers of a CTA: 0 and 15 are those of all

// Of a segment, beside its units'. More where lengths are on the device: they end within a tile, which takes longer.
// Measured, see profiling/NOTES.md.
CUTE_HOST_DEVICE constexpr int segment_places(bool ragged) { return ragged ? 3 : 2; }

// Of a segment.
CUTE_HOST_DEVICE constexpr int64_t window_units_of(int64_t tokens) {
  return (tokens + kWindowUnitTokens - 1) / kWindowUnitTokens;
}
CUTE_HOST_DEVICE constexpr int64_t tiles_of(int64_t tokens) { return (tokens + kUnitTokens - 1) / kUnitTokens; }
CUTE_HOST_DEVICE constexpr int64_t units_of(int64_t tokens, int64_t window_tokens) {
  int64_t units = tiles_of(tokens) + window_units_of(window_tokens);
  return units > 0 ? units : 1;
}

struct UnitRange {
  int begin, end;
};

struct Segment {
  int index;
  int row, sequence;  // of q, and where its tokens are stored
  int kv_head;
  int first_row, rows;  // of its block of query rows
  UnitRange units;      // in the line
  int window_units;     // of them; the first, unless by_segments
  int tokens, window_tokens;

  CUTE_DEVICE UnitMap unit_map() const {  // unless by_segments
    int end = units.begin + window_units;
    return {units.begin, end, end};
  }
};

template <class Traits>
CUTE_DEVICE uint8_t const* channel_order(format::SparseView const& view, Segment const& segment) {
  return view.channel_order + (int64_t{segment.sequence} * view.kv_heads + segment.kv_head) * Traits::kHeadDim;
}

// Shared memory that a WorkLine takes; stages may follow.
constexpr int line_bytes(bool ragged, int batch) {
  int row_bytes = ragged ? (batch + 1) * static_cast<int>(sizeof(int)) + static_cast<int>(sizeof(Cut)) : 0;
  return ((kMaxWorkers + 1) * static_cast<int>(sizeof(int)) + row_bytes + 127) / 128 * 128;
}

// What a CTA knows of the line.
template <class Traits>
class WorkLine {
 public:
  // shared: line_bytes of shared memory, at an address that takes no register: the work is looked up all over.
  CUTE_DEVICE WorkLine(Params const& params, void* shared)
      : params_(params), piece_begins_(static_cast<int*>(shared)), unit_ends_(piece_begins_ + kMaxWorkers + 1) {}

  // With all threads of the CTA: before anything else is asked for.
  CUTE_DEVICE void prepare() {
    if (!ragged()) return;
    CUTE_NO_UNROLL
    for (int row = threadIdx.x; row < params_.batch; row += blockDim.x) {
      int sequence = sequence_of(row);
      unit_ends_[row + 1] = static_cast<int>(units_of(tokens_of(sequence), window_tokens_of(sequence)));
    }
    __syncthreads();
    if (threadIdx.x < 32) add_up_units();
    __syncthreads();
  }

  // With all threads of the CTA: before its workers' pieces are asked for.
  CUTE_DEVICE void deal_pieces() {
    if constexpr (Traits::kPlain) return;  // soon worked out
    int worker = threadIdx.x;
    if (worker <= params_.workers) piece_begins_[worker] = piece_begin(blockIdx.x * params_.workers + worker);
    __syncthreads();
  }

  // Of the whole line's pieces; some are empty if there are fewer units.
  CUTE_DEVICE int piece_begin(int piece) const {
    if (!params_.by_segments) return unit_at(place_of_piece(piece));
    int segment, index;
    params_.pieces(segment, index, piece);
    return segment * params_.units_per_segment.divisor + segment_cut().units_before(index);
  }
  CUTE_DEVICE UnitRange piece_of_worker(int worker) const {
    if constexpr (!Traits::kPlain) return {piece_begins_[worker], piece_begins_[worker + 1]};
    int piece = blockIdx.x * params_.workers + worker;
    return {piece_begin(piece), piece_begin(piece + 1)};
  }

  CUTE_DEVICE UnitMap unit_map(Segment const& segment, int piece) const {
    return params_.by_segments ? segment_cut().unit_map(segment.units.begin, params_.pieces.rem(piece))
                               : segment.unit_map();
  }

  // Units of any piece at most.
  CUTE_DEVICE int longest() const { return ragged() ? ragged_cut()->longest() : params_.longest; }

  // Unless by_segments: of the whole line's, the piece that has a unit of a segment.
  CUTE_DEVICE int piece_with(Segment const& segment, int unit) const {
    int place = unit + segment_places(ragged()) * (segment.index + 1);
    float share = static_cast<float>(place) / static_cast<float>(cut_of_line().all);
    int piece = max(0, static_cast<int>(share * params_.pieces.divisor) - 1);  // rounding moves it by less than one
    while (place_of_piece(piece + 1) <= place) ++piece;
    return piece;
  }
  // Likewise: whether a piece has no place.
  CUTE_DEVICE bool is_empty(int piece) const { return place_of_piece(piece) == place_of_piece(piece + 1); }

  CUTE_DEVICE Segment segment(int index) const {
    int row, in_row;
    params_.row_segments(row, in_row, index);
    if (!ragged()) {
      int units = params_.units_per_segment.divisor;
      return make_segment(row, in_row, index * units, units);
    }
    int units = unit_ends_[row + 1] - unit_ends_[row];
    return make_segment(row, in_row, unit_ends_[row] * params_.row_segments.divisor + in_row * units, units);
  }

  CUTE_DEVICE Segment segment_with(int unit) const {
    if (!ragged()) return segment(params_.units_per_segment.div(unit));
    int row = row_at(params_.row_segments.div(unit), 0);
    int units = unit_ends_[row + 1] - unit_ends_[row], before = unit_ends_[row] * params_.row_segments.divisor;
    int in_row = (unit - before) / units;
    return make_segment(row, in_row, before + in_row * units, units);
  }

  CUTE_DEVICE int tokens_of(int sequence) const {
    int all = static_cast<int>(params_.keys.tokens);
    return !Traits::kPlain && params_.lengths ? max(0, min(all, __ldg(params_.lengths + sequence))) : all;
  }
  CUTE_DEVICE int window_tokens_of(int sequence) const {
    int all = params_.window.tokens;
    return !Traits::kPlain && all > 0 && params_.window.lengths
               ? max(0, min(all, __ldg(params_.window.lengths + sequence)))
               : all;
  }

 private:
  Params const& params_;
  int* piece_begins_;  // (workers + 1): of the CTA's
  int* unit_ends_;     // (batch + 1): units of one segment of every row before; then the cut

  CUTE_DEVICE bool ragged() const { return !Traits::kPlain && params_.ragged; }

  CUTE_DEVICE Cut cut_of_line() const {
    if (ragged()) return *ragged_cut();
    return params_.cut;
  }
  CUTE_DEVICE Cut* ragged_cut() const { return reinterpret_cast<Cut*>(unit_ends_ + params_.batch + 1); }

  // Where a piece begins. Pieces differ by one at most, the longer ones spread evenly.
  CUTE_DEVICE int place_of_piece(int piece) const { return cut_of_line().begin(piece, params_.pieces); }

  CUTE_DEVICE SegmentCut segment_cut() const {
    return {params_.pieces, params_.cut, static_cast<int>(window_units_of(params_.window.tokens)),
            params_.window_places};
  }

  // If ragged: the row at a place of a line that has one segment of every row, each with some places of its own.
  CUTE_DEVICE int row_at(int place, int places_each) const {
    int low = 0, high = params_.batch;
    CUTE_NO_UNROLL
    while (high - low > 1) {
      int middle = (low + high) / 2;
      (unit_ends_[middle] + places_each * middle <= place ? low : high) = middle;
    }
    return low;
  }

  // The unit at, or the first one behind, a place.
  CUTE_DEVICE int unit_at(int place) const {
    int own_places = segment_places(ragged());
    auto unit_in_segment = [&](int place) { return max(0, place - own_places); };
    if (!ragged()) {
      int segment, in_segment;
      params_.places_per_segment(segment, in_segment, place);
      return segment * params_.units_per_segment.divisor + unit_in_segment(in_segment);
    }
    int row = row_at(params_.row_segments.div(place), own_places), first = unit_ends_[row];
    int units = unit_ends_[row + 1] - first, places = units + own_places;
    int in_row = place - (first + own_places * row) * params_.row_segments.divisor, segments = in_row / places;
    return first * params_.row_segments.divisor + segments * units + unit_in_segment(in_row - segments * places);
  }

  // With one warp.
  CUTE_DEVICE void add_up_units() {
    int lane = threadIdx.x, sum = 0;
    if (lane == 0) unit_ends_[0] = 0;
    CUTE_NO_UNROLL
    for (int first = 0; first < params_.batch; first += 32) {
      int units = first + lane < params_.batch ? unit_ends_[first + lane + 1] : 0;
      CUTE_UNROLL
      for (int distance = 1; distance < 32; distance *= 2) {
        int below = __shfl_up_sync(~0u, units, distance);
        if (lane >= distance) units += below;
      }
      if (first + lane < params_.batch) unit_ends_[first + lane + 1] = sum + units;
      sum += __shfl_sync(~0u, units, 31);
    }
    if (lane > 0) return;
    Cut& cut = *ragged_cut();
    cut.all = (sum + segment_places(true) * params_.batch) * params_.row_segments.divisor;
    params_.pieces(cut.piece, cut.spare, cut.all);
  }

  CUTE_DEVICE int sequence_of(int row) const {
    return !Traits::kPlain && params_.sequences ? __ldg(params_.sequences + row) : row;
  }

  CUTE_DEVICE Segment make_segment(int row, int in_row, int begin, int units) const {
    int kv_head, block;
    params_.row_blocks(kv_head, block, in_row);
    int first_row = block * Traits::kN, sequence = sequence_of(row), window_tokens = window_tokens_of(sequence);
    return {row * params_.row_segments.divisor + in_row,
            row,
            sequence,
            kv_head,
            first_row,
            min(Traits::kN, params_.rows - first_row),
            {begin, begin + units},
            static_cast<int>(window_units_of(window_tokens)),
            tokens_of(sequence),
            window_tokens};
  }
};

}  // namespace cute_kernels::attention
