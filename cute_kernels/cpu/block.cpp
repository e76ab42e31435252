// Blocks of a tile: bitmap, scales and values, from a dense tile and back to one.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/cpu/element_codec.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/cpu/tile_steps.hpp"
#include "cute_kernels/cpu/two_of_four.hpp"

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
void write_block_as(SparseView const& view, uint16_t const* dense, TileScales const& scales, int rows,
                    uint32_t* block) {
  uint16_t const* positions = positions_of(view);
  int const elements = TileFormat::lane_elements(view.padded_head_dim);
  int const first_row = TileFormat::first_value_row<Codec>(view.padded_head_dim);
  int const most = Codec::most_values(rows - first_row);
  if constexpr (Codec::kHasScales)
    std::memcpy(block + TileFormat::bitmap_rows(view.padded_head_dim) * kLanes, scales.tokens, format::kRowBytes);
  LaneStreams streams;
  for (int lane = 0; lane < kLanes; ++lane, positions += elements) {
    std::fill_n(streams.length, kStreams, 0);
    for (int e0 = 0; e0 < elements; e0 += kWordElements) {
      uint32_t word = 0;
      for (int i = 0; i < kWordElements; ++i) {
        int const index = positions[e0 + i], s = TileFormat::stream(i), nonzero = dense[index] != 0;
        word |= static_cast<uint32_t>(nonzero) << TileFormat::bitmap_bit<Codec::kBitDistance>(i);
        if (!Codec::kHasScales || nonzero)
          streams.value[s][streams.length[s]] = encode_element<Codec>(view, scales, dense[index], index);
        streams.length[s] += nonzero;
      }
      block[TileFormat::bitmap_word(e0) * kLanes + lane] = word;
    }
    uint32_t* values = block + first_row * kLanes + lane;
    for (int row = 0; row < rows - first_row; ++row) values[row * kLanes] = 0;
    for (int s = 0; s < kStreams; ++s)
      for (int rank = 0; rank < std::min(streams.length[s], most); ++rank)
        values[Codec::value_row(s, rank) * kLanes] |= Codec::place(streams.value[s][rank], s, rank);
  }
}

template <class Codec>
void read_block_as(SparseView const& view, uint32_t const* block, TileScales const& scales, int rows, uint16_t* dense) {
  uint16_t const* positions = positions_of(view);
  int const elements = TileFormat::lane_elements(view.padded_head_dim);
  int const first_row = TileFormat::first_value_row<Codec>(view.padded_head_dim);
  int const most = std::min(Codec::most_values(rows - first_row), LaneStreams::kMost - 1);
  LaneStreams streams;
  for (int lane = 0; lane < kLanes; ++lane, positions += elements) {
    uint32_t const* values = block + first_row * kLanes + lane;
    for (int s = 0; s < kStreams; ++s) {
      for (int rank = 0; rank < most; ++rank)
        streams.value[s][rank] = Codec::extract(values[Codec::value_row(s, rank) * kLanes], s, rank);
      streams.value[s][most] = 0;
      streams.length[s] = 0;
    }
    for (int e0 = 0; e0 < elements; e0 += kWordElements) {
      uint32_t const word = block[TileFormat::bitmap_word(e0) * kLanes + lane];
      for (int i = 0; i < kWordElements; ++i) {
        int const s = TileFormat::stream(i), index = positions[e0 + i];
        uint32_t const bit = (word >> TileFormat::bitmap_bit<Codec::kBitDistance>(i)) & 1;
        uint16_t const x = decode_element<Codec>(view, scales, streams.value[s][streams.length[s]], index);
        dense[index] = static_cast<uint16_t>(x & (0u - bit));
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

void write_block(SparseView const& view, uint16_t const* dense, TileScales const& scales, int rows, uint32_t* block) {
  if (view.tile_format != TileFormat::kId) {
    write_two_of_four(view, dense, scales, rows, block);
    return;
  }
  format::visit_codec(view.codec,
                      [&](auto codec) { write_block_as<decltype(codec)>(view, dense, scales, rows, block); });
}

void read_block(SparseView const& view, uint32_t const* block, uint16_t const* channel_scales, int rows,
                uint16_t* dense) {
  TileScales const scales{view.token_scales(block), channel_scales};
  if (view.tile_format != TileFormat::kId) return read_two_of_four(view, block, scales, dense);
  format::visit_codec(view.codec,
                      [&](auto codec) { read_block_as<decltype(codec)>(view, block, scales, rows, dense); });
}

}  // namespace cute_kernels::cpu
