// Blocks of a tile: bitmap rows and value rows, from a dense tile and back to one.
#include <algorithm>
#include <utility>
#include <vector>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/cpu/tile_steps.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kLanes;

constexpr int kWordElements = TileFormat::kWordElements;

// The value streams of one lane, with an entry to spare: loops over elements write or read the value after the last, so
// that they take no branch on the pattern.
struct LaneStreams {
  static constexpr int kMost = TileFormat::stream_elements(format::kMaxHeadDim) + 1;
  uint32_t value[kStreams][kMost];
  int length[kStreams];
};

uint16_t const* positions_of(SparseView const& view) { return element_table(view.role, view.padded_head_dim).data(); }

template <class Codec>
void write_block_as(SparseView const& view, uint16_t const* dense, int rows, uint32_t* block) {
  uint16_t const* positions = positions_of(view);
  int const elements = TileFormat::lane_elements(view.padded_head_dim);
  int const bitmap_rows = TileFormat::bitmap_rows(view.padded_head_dim);
  int const most = (rows - bitmap_rows) * Codec::kValuesPerRow;
  LaneStreams streams;
  for (int lane = 0; lane < kLanes; ++lane, positions += elements) {
    std::fill_n(streams.length, kStreams, 0);
    for (int e0 = 0; e0 < elements; e0 += kWordElements) {
      uint32_t word = 0;
      for (int i = 0; i < kWordElements; ++i) {
        uint32_t const value = Codec::encode(dense[positions[e0 + i]], view.dtype);
        int const s = TileFormat::stream(i), nonzero = !Codec::is_zero(value);
        word |= static_cast<uint32_t>(nonzero) << TileFormat::bitmap_bit(i);
        streams.value[s][streams.length[s]] = value;
        streams.length[s] += nonzero;
      }
      block[TileFormat::bitmap_word(e0) * kLanes + lane] = word;
    }
    uint32_t* values = block + bitmap_rows * kLanes + lane;
    for (int row = 0; row < rows - bitmap_rows; ++row) values[row * kLanes] = 0;
    for (int s = 0; s < kStreams; ++s)
      for (int rank = 0; rank < std::min(streams.length[s], most); ++rank)
        values[rank / Codec::kValuesPerRow * kLanes] |= Codec::place(streams.value[s][rank], s, rank);
  }
}

template <class Codec>
void read_block_as(SparseView const& view, uint32_t const* block, int rows, uint16_t* dense) {
  uint16_t const* positions = positions_of(view);
  int const elements = TileFormat::lane_elements(view.padded_head_dim);
  int const bitmap_rows = TileFormat::bitmap_rows(view.padded_head_dim);
  int const most = std::min((rows - bitmap_rows) * Codec::kValuesPerRow, LaneStreams::kMost - 1);
  LaneStreams streams;
  for (int lane = 0; lane < kLanes; ++lane, positions += elements) {
    uint32_t const* values = block + bitmap_rows * kLanes + lane;
    for (int s = 0; s < kStreams; ++s) {
      for (int rank = 0; rank < most; ++rank)
        streams.value[s][rank] =
            Codec::decode(Codec::extract(values[rank / Codec::kValuesPerRow * kLanes], s, rank), view.dtype);
      streams.value[s][most] = 0;
      streams.length[s] = 0;
    }
    for (int e0 = 0; e0 < elements; e0 += kWordElements) {
      uint32_t const word = block[TileFormat::bitmap_word(e0) * kLanes + lane];
      for (int i = 0; i < kWordElements; ++i) {
        int const s = TileFormat::stream(i);
        uint32_t const bit = (word >> TileFormat::bitmap_bit(i)) & 1;
        dense[positions[e0 + i]] = static_cast<uint16_t>(streams.value[s][streams.length[s]] & (0u - bit));
        streams.length[s] += static_cast<int>(bit);
      }
    }
  }
}

}  // namespace

int trim_streams(SparseView const& view, int most, uint16_t* dense) {
  uint16_t const* positions = positions_of(view);
  int const elements = TileFormat::lane_elements(view.padded_head_dim);
  int dropped = 0;
  std::vector<std::pair<uint32_t, uint16_t*>> stream;  // magnitude, where the value is
  for (int lane = 0; lane < kLanes; ++lane, positions += elements)
    for (int s = 0; s < kStreams; ++s) {
      stream.clear();
      for (int e = elements - kStreams + s; e >= 0; e -= kStreams)  // the later first
        if (uint16_t* value = dense + positions[e]; *value)
          stream.emplace_back(magnitude_key(*value, nan_key(view.dtype)), value);
      int const excess = static_cast<int>(stream.size()) - most;
      if (excess <= 0) continue;
      std::stable_sort(stream.begin(), stream.end(), [](auto& a, auto& b) { return a.first < b.first; });
      for (int i = 0; i < excess; ++i) *stream[i].second = 0;
      dropped += excess;
    }
  return dropped;
}

void write_block(SparseView const& view, uint16_t const* dense, int rows, uint32_t* block) {
  format::visit_codec(view.codec, [&](auto codec) { write_block_as<decltype(codec)>(view, dense, rows, block); });
}

void read_block(SparseView const& view, uint32_t const* block, int rows, uint16_t* dense) {
  format::visit_codec(view.codec, [&](auto codec) { read_block_as<decltype(codec)>(view, block, rows, dense); });
}

}  // namespace cute_kernels::cpu
