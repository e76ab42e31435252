// Dense rows to tiles and back, by way of a dense copy of the tile in position order.
#include <atomic>
#include <cstring>
#include <vector>

#include "cute_kernels/cpu/parallel.hpp"
#include "cute_kernels/cpu/tile_steps.hpp"
#include "cute_kernels/cpu/two_of_four.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kLanes;
using format::kTileTokens;

// One tile of a view: which tokens and channels it holds, and where.
struct TileInfo {
  int64_t head, first_token;
  uint8_t const* token_order;
  uint8_t const* channel_order;
  uint16_t const* channel_scales;
  uint32_t const* block;
  int rows;  // of the block

  TileInfo(SparseView const& view, int64_t tile_index) {
    int64_t const tiles = view.tiles_per_head();
    head = tile_index / tiles;
    first_token = tile_index % tiles * kTileTokens;
    token_order = view.token_order + tile_index * kTileTokens;
    int const sequence = static_cast<int>(head / view.kv_heads), kv_head = static_cast<int>(head % view.kv_heads);
    channel_order = view.channel_order_of(sequence, kv_head);
    channel_scales = view.channel_scale_of(sequence, kv_head);
    block = view.blocks + int64_t{view.row_offsets[tile_index]} * kLanes;
    rows = view.row_offsets[tile_index + 1] - view.row_offsets[tile_index];
  }
};

}  // namespace

void gather_tile(DenseView const& x, int64_t head, int64_t first_token, uint32_t const* masks,
                 uint8_t const* token_order, uint8_t const* channel_order, int padded, uint16_t* dense) {
  uint16_t kept[format::kMaxHeadDim];  // one token in natural channel order; padding channels are empty
  for (int t = 0; t < kTileTokens; ++t) {
    uint16_t* row = dense + t * padded;
    int64_t const token = first_token + token_order[t];
    if (token >= x.tokens) {
      std::memset(row, 0, padded * sizeof *row);
      continue;
    }
    uint16_t const* values = x.row(head, token);
    uint32_t const* mask = masks + token_order[t] * (padded / 32);
    for (int c = 0; c < x.head_dim; ++c)
      kept[c] = values[c] & static_cast<uint16_t>(0u - ((mask[c / 32] >> (c % 32)) & 1));
    for (int c = x.head_dim; c < padded; ++c) kept[c] = 0;
    for (int c = 0; c < padded; ++c) row[c] = kept[channel_order[c]];
  }
}

namespace {

// write(view, dense tile, scales, index of the tile, where it is)
template <class F>
void pack_tiles(DenseView const& x, uint32_t const* masks, uint16_t const* token_scale, SparseView const& view,
                int threads, F&& write) {
  int const padded = view.padded_head_dim;
  parallel(threads, view.tiles(), [&](TaskQueue& queue) {
    std::vector<uint16_t> dense(static_cast<size_t>(kTileTokens) * padded);
    for (int64_t task; (task = queue.next()) >= 0;) {
      TileInfo const tile(view, task);
      uint32_t const* tile_masks = masks + (tile.head * x.tokens + tile.first_token) * (padded / 32);
      gather_tile(x, tile.head, tile.first_token, tile_masks, tile.token_order, tile.channel_order, padded,
                  dense.data());
      uint16_t scales[kTileTokens];
      for (int p = 0; p < kTileTokens && token_scale; ++p)
        scales[format::scale_index(p)] = token_scale[task * kTileTokens + tile.token_order[p]];
      write(dense.data(), TileScales{scales, tile.channel_scales}, task, tile);
    }
  });
}

}  // namespace

void pack(DenseView const& x, uint32_t const* masks, uint16_t const* token_scale, SparseView const& view, int threads) {
  pack_tiles(x, masks, token_scale, view, threads,
             [&](uint16_t const* dense, TileScales const& scales, int64_t, TileInfo const& tile) {
               write_block(view, dense, scales, tile.rows, const_cast<uint32_t*>(tile.block));
             });
}

void pack_slots(DenseView const& x, uint32_t const* masks, uint16_t const* token_scale, SparseView const& view,
                int32_t const* tile_rows, int64_t* dropped, int threads) {
  std::atomic<int64_t> tiles{0}, values{0};
  pack_tiles(x, masks, token_scale, view, threads,
             [&](uint16_t const* dense, TileScales const& scales, int64_t index, TileInfo const& tile) {
               int const lost =
                   write_two_of_four(view, dense, scales, tile_rows[index], const_cast<uint32_t*>(tile.block));
               if (lost) ++tiles, values += lost;
             });
  dropped[0] += tiles, dropped[1] += values;
}

void scatter_tile(uint16_t const* dense, uint8_t const* token_order, uint8_t const* channel_order, int padded,
                  int head_dim, int64_t tokens, uint16_t* out) {
  uint16_t row[format::kMaxHeadDim];
  for (int t = 0; t < kTileTokens; ++t) {
    if (token_order[t] >= tokens) continue;
    for (int c = 0; c < padded; ++c) row[channel_order[c]] = dense[t * padded + c];
    std::memcpy(out + int64_t{token_order[t]} * head_dim, row, head_dim * sizeof *row);
  }
}

void decompress(SparseView const& view, uint16_t* out, int threads) {
  int const padded = view.padded_head_dim;
  parallel(threads, view.tiles(), [&](TaskQueue& queue) {
    std::vector<uint16_t> dense(static_cast<size_t>(kTileTokens) * padded);
    for (int64_t task; (task = queue.next()) >= 0;) {
      TileInfo const tile(view, task);
      read_block(view, tile.block, tile.channel_scales, tile.rows, dense.data());
      scatter_tile(dense.data(), tile.token_order, tile.channel_order, padded, view.head_dim,
                   view.tokens - tile.first_token, out + (tile.head * view.tokens + tile.first_token) * view.head_dim);
    }
  });
}

}  // namespace cute_kernels::cpu
