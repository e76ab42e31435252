// Dense rows to tiles and back. A tile goes through a dense copy in position order, element_layout's codomain.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/cpu/parallel.hpp"
#include "cute_kernels/cpu/tile_steps.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kLanes;
using format::kTileTokens;
using format::kWordElements;

// One tile of a view: which tokens and channels it holds, and where.
struct TileInfo {
  int64_t head, first_token;
  const uint8_t* token_order;
  const uint8_t* channel_order;
  const uint32_t* block;
  int rows;  // of the block

  TileInfo(const SparseView& view, int64_t tile_index) {
    const int64_t tiles = view.tiles_per_head();
    head = tile_index / tiles;
    first_token = tile_index % tiles * kTileTokens;
    token_order = view.token_order + tile_index * kTileTokens;
    channel_order = view.channel_order + head * view.padded_head_dim;
    block = view.blocks + int64_t{view.row_offsets[tile_index]} * kLanes;
    rows = view.row_offsets[tile_index + 1] - view.row_offsets[tile_index];
  }
};

// The value streams of one lane, with room for the value after the last: loops over elements take no branch on the
// pattern.
struct LaneStreams {
  static constexpr int kMost = format::lane_elements(format::kMaxHeadDim) / kStreams + 1;
  uint16_t value[kStreams][kMost];
  int length[kStreams];
};

}  // namespace

void gather_tile(const DenseView& x, int64_t head, int64_t first_token, const uint32_t* masks,
                 const uint8_t* token_order, const uint8_t* channel_order, int padded, uint16_t* dense) {
  uint16_t kept[format::kMaxHeadDim];  // one token in natural channel order; padding channels are empty
  for (int t = 0; t < kTileTokens; ++t) {
    uint16_t* row = dense + t * padded;
    const int64_t token = first_token + token_order[t];
    if (token >= x.tokens) {
      std::memset(row, 0, padded * sizeof *row);
      continue;
    }
    const uint16_t* values = x.row(head, token);
    const uint32_t* mask = masks + token_order[t] * (padded / 32);
    for (int c = 0; c < x.head_dim; ++c)
      kept[c] = values[c] & static_cast<uint16_t>(0u - ((mask[c / 32] >> (c % 32)) & 1));
    for (int c = x.head_dim; c < padded; ++c) kept[c] = 0;
    for (int c = 0; c < padded; ++c) row[c] = kept[channel_order[c]];
  }
}

int trim_streams(uint16_t* dense, const uint16_t* positions, int padded, int most, DType dtype) {
  const int elements = format::lane_elements(padded);
  int dropped = 0;
  std::vector<std::pair<uint32_t, uint16_t*>> stream;  // magnitude and place
  for (int lane = 0; lane < kLanes; ++lane, positions += elements)
    for (int s = 0; s < kStreams; ++s) {
      stream.clear();
      for (int e = elements - kStreams + s; e >= 0; e -= kStreams)  // the later first
        if (uint16_t* value = dense + positions[e]; *value)
          stream.emplace_back(magnitude_key(*value, nan_key(dtype)), value);
      const int excess = static_cast<int>(stream.size()) - most;
      if (excess <= 0) continue;
      std::stable_sort(stream.begin(), stream.end(), [](auto& a, auto& b) { return a.first < b.first; });
      for (int i = 0; i < excess; ++i) *stream[i].second = 0;
      dropped += excess;
    }
  return dropped;
}

void write_block(const uint16_t* dense, const uint16_t* positions, int padded, int rows, uint32_t* block) {
  const int elements = format::lane_elements(padded), bitmap_rows = format::bitmap_rows(padded);
  LaneStreams streams;
  for (int lane = 0; lane < kLanes; ++lane, positions += elements) {
    std::fill_n(streams.length, kStreams, 0);
    for (int e0 = 0; e0 < elements; e0 += kWordElements) {
      uint32_t word = 0;
      for (int i = 0; i < kWordElements; ++i) {
        const uint16_t value = dense[positions[e0 + i]];
        const int s = format::Codec16::stream(i), nonzero = value != 0;
        word |= static_cast<uint32_t>(nonzero) << format::bitmap_bit(i);
        streams.value[s][streams.length[s]] = value;
        streams.length[s] += nonzero;
      }
      block[format::bitmap_word(e0) * kLanes + lane] = word;
    }
    for (int row = 0; row < rows - bitmap_rows; ++row) {
      uint32_t word = 0;
      for (int s = 0; s < kStreams; ++s)
        if (row < streams.length[s]) word |= format::Codec16::place(streams.value[s][row], s);
      block[(bitmap_rows + row) * kLanes + lane] = word;
    }
  }
}

void read_block(const uint32_t* block, const uint16_t* positions, int padded, int rows, uint16_t* dense) {
  const int elements = format::lane_elements(padded), bitmap_rows = format::bitmap_rows(padded);
  LaneStreams streams;
  for (int lane = 0; lane < kLanes; ++lane, positions += elements) {
    for (int s = 0; s < kStreams; ++s) {
      for (int row = 0; row < rows - bitmap_rows; ++row)
        streams.value[s][row] =
            static_cast<uint16_t>(format::Codec16::extract(block[(bitmap_rows + row) * kLanes + lane], s));
      streams.value[s][rows - bitmap_rows] = 0;
      streams.length[s] = 0;
    }
    for (int e0 = 0; e0 < elements; e0 += kWordElements) {
      const uint32_t word = block[format::bitmap_word(e0) * kLanes + lane];
      for (int i = 0; i < kWordElements; ++i) {
        const int s = format::Codec16::stream(i);
        const uint32_t bit = (word >> format::bitmap_bit(i)) & 1;
        dense[positions[e0 + i]] = streams.value[s][streams.length[s]] & static_cast<uint16_t>(0u - bit);
        streams.length[s] += static_cast<int>(bit);
      }
    }
  }
}

void pack(const DenseView& x, const uint32_t* masks, const SparseView& view, int threads) {
  const int padded = view.padded_head_dim;
  const uint16_t* positions = element_table(view.role, padded).data();
  parallel(threads, view.tiles(), [&](TaskQueue& queue) {
    std::vector<uint16_t> dense(static_cast<size_t>(kTileTokens) * padded);
    for (int64_t task; (task = queue.next()) >= 0;) {
      const TileInfo tile(view, task);
      const uint32_t* tile_masks = masks + (tile.head * x.tokens + tile.first_token) * (padded / 32);
      gather_tile(x, tile.head, tile.first_token, tile_masks, tile.token_order, tile.channel_order, padded,
                  dense.data());
      write_block(dense.data(), positions, padded, tile.rows, const_cast<uint32_t*>(tile.block));
    }
  });
}

void scatter_tile(const uint16_t* dense, const uint8_t* token_order, const uint8_t* channel_order, int padded,
                  int head_dim, int64_t tokens, uint16_t* out) {
  uint16_t row[format::kMaxHeadDim];
  for (int t = 0; t < kTileTokens; ++t) {
    if (token_order[t] >= tokens) continue;
    for (int c = 0; c < padded; ++c) row[channel_order[c]] = dense[t * padded + c];
    std::memcpy(out + int64_t{token_order[t]} * head_dim, row, head_dim * sizeof *row);
  }
}

void decompress(const SparseView& view, uint16_t* out, int threads) {
  const int padded = view.padded_head_dim;
  const uint16_t* positions = element_table(view.role, padded).data();
  parallel(threads, view.tiles(), [&](TaskQueue& queue) {
    std::vector<uint16_t> dense(static_cast<size_t>(kTileTokens) * padded);
    for (int64_t task; (task = queue.next()) >= 0;) {
      const TileInfo tile(view, task);
      read_block(tile.block, positions, padded, tile.rows, dense.data());
      scatter_tile(dense.data(), tile.token_order, tile.channel_order, padded, view.head_dim,
                   view.tokens - tile.first_token, out + (tile.head * view.tokens + tile.first_token) * view.head_dim);
    }
  });
}

}  // namespace cute_kernels::cpu
