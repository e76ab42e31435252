#include "cute_kernels/cpu/two_of_four.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/cpu/element_codec.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/cpu/parallel.hpp"
#include "cute_kernels/format/head_dim.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kLanes;
using format::Role;
using Tile = format::TwoOfFourTile;

template <Role kRole, int HeadDim>
std::vector<LaneGroup> make_lane_groups() {
  constexpr auto layout = Tile::element_layout<kRole, HeadDim>();
  constexpr int kGroups = Tile::lane_groups(HeadDim);
  std::vector<LaneGroup> groups(kLanes * kGroups);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int group = 0; group < kGroups; ++group) {
      LaneGroup& entry = groups[lane * kGroups + group];
      for (int i = 0; i < Tile::kGroup; ++i)
        entry.position[i] = static_cast<uint16_t>(layout(lane, Tile::kGroup * group + i));
      auto const place = Tile::metadata_place(kRole, HeadDim, lane, group);
      entry.metadata_word = static_cast<uint16_t>(place.row * kLanes + place.lane);
      entry.metadata_bit = static_cast<uint8_t>(place.bit);
    }
  return groups;
}

// The indices of the two largest of four keys of magnitudes, in order; ties to the first.
struct Pair {
  int first, second;
};
Pair two_largest(uint32_t const (&keys)[Tile::kGroup]) {
  int best = 0, next = 1;
  if (keys[1] > keys[0]) best = 1, next = 0;
  for (int i = 2; i < Tile::kGroup; ++i) {
    if (keys[i] > keys[best])
      next = best, best = i;
    else if (keys[i] > keys[next])
      next = i;
  }
  return {std::min(best, next), std::max(best, next)};
}

// f(position, value's word in the block, its first bit) for every stored value of a block.
template <class Codec, class F>
void for_values(SparseView const& view, uint32_t const* block, F&& f) {
  int const padded = view.padded_head_dim, count = Tile::lane_groups(padded);
  int const first_word = Tile::first_value_row<Codec>(padded) * kLanes;
  LaneGroup const* groups = lane_groups(view.role, padded).data();
  for (int lane = 0; lane < kLanes; ++lane)
    for (int group = 0; group < count; ++group, ++groups) {
      uint32_t const kept = block[groups->metadata_word] >> groups->metadata_bit;
      int const word = first_word + Tile::value_row<Codec>(group) * kLanes + lane;
      for (int i = 0; i < Tile::kKept; ++i)
        f(groups->position[kept >> (2 * i) & 3], word, Tile::first_bit<Codec>(group, i));
    }
}

template <class Codec>
constexpr uint32_t kValueMask = (1u << Codec::kValueBits) - 1;

template <class Codec>
void write_as(SparseView const& view, uint16_t const* dense, TileScales const& scales, uint32_t* block) {
  int const padded = view.padded_head_dim, count = Tile::lane_groups(padded);
  std::fill_n(block, Tile::tile_rows<Codec>(padded) * kLanes, 0u);
  if constexpr (Codec::kHasScales)
    std::memcpy(block + Tile::metadata_rows(padded) * kLanes, scales.tokens, format::kRowBytes);
  uint32_t* values = block + Tile::first_value_row<Codec>(padded) * kLanes;
  LaneGroup const* groups = lane_groups(view.role, padded).data();
  uint32_t const nan = nan_key(view.dtype);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int group = 0; group < count; ++group, ++groups) {
      uint32_t keys[Tile::kGroup];
      for (int i = 0; i < Tile::kGroup; ++i) keys[i] = magnitude_key(dense[groups->position[i]], nan);
      Pair const kept = two_largest(keys);
      block[groups->metadata_word] |= static_cast<uint32_t>(kept.first | kept.second << 2) << groups->metadata_bit;
      for (int i = 0; i < Tile::kKept; ++i) {
        int const index = groups->position[i ? kept.second : kept.first];
        uint16_t const x = dense[index] & 0x7fff ? dense[index] : 0;
        values[Tile::value_row<Codec>(group) * kLanes + lane] |= encode_element<Codec>(view, scales, x, index)
                                                                 << Tile::first_bit<Codec>(group, i);
      }
    }
}

template <class Codec>
void read_as(SparseView const& view, uint32_t const* block, TileScales const& scales, uint16_t* dense) {
  std::fill_n(dense, format::kTileTokens * view.padded_head_dim, uint16_t{0});
  for_values<Codec>(view, block, [&](int position, int word, int bit) {
    dense[position] = decode_element<Codec>(view, scales, block[word] >> bit & kValueMask<Codec>, position);
  });
}

}  // namespace

std::vector<LaneGroup> const& lane_groups(Role role, int padded_head_dim) {
  return format::visit_head_dim(padded_head_dim, [&](auto head_dim) -> std::vector<LaneGroup> const& {
    static std::vector<LaneGroup> const keys = make_lane_groups<Role::kKey, head_dim()>();
    static std::vector<LaneGroup> const values = make_lane_groups<Role::kValue, head_dim()>();
    return role == Role::kKey ? keys : values;
  });
}

void write_two_of_four(SparseView const& view, uint16_t const* dense, TileScales const& scales, uint32_t* block) {
  format::visit_codec(view.codec, [&](auto codec) { write_as<decltype(codec)>(view, dense, scales, block); });
}

void read_two_of_four(SparseView const& view, uint32_t const* block, TileScales const& scales, uint16_t* dense) {
  format::visit_codec(view.codec, [&](auto codec) { read_as<decltype(codec)>(view, block, scales, dense); });
}

void unpack_two_of_four(SparseView const& view, uint32_t const* block, UnpackedTile const& tile) {
  using Bitmap = format::BitmapTile;
  constexpr int kEntries = Bitmap::kWordElements / kStreams;  // of a stream in a mask
  int const elements = Bitmap::lane_elements(view.padded_head_dim);
  std::vector<float> value(static_cast<size_t>(format::kTileTokens) * view.padded_head_dim);
  std::vector<uint8_t> stored(value.size());
  format::visit_codec(view.codec, [&](auto codec) {
    using Codec = decltype(codec);
    for_values<Codec>(view, block, [&](int position, int word, int bit) {
      uint32_t const bits = block[word] >> bit & kValueMask<Codec>;
      if constexpr (Codec::kHasScales) {
        value[position] = Codec::number(bits), stored[position] = 1;
      } else {
        value[position] = element_to_float(static_cast<uint16_t>(bits), view.dtype);
        stored[position] = bits != 0;
      }
    });
  });
  uint16_t const* positions = element_table(view.role, view.padded_head_dim).data();
  for (int lane = 0; lane < kLanes; ++lane, positions += elements)
    for (int s = 0; s < kStreams; ++s) {
      float* next = tile.streams + (lane * kStreams + s) * tile.stride;
      for (int word = 0; word < elements / Bitmap::kWordElements; ++word) {
        uint32_t mask = 0;
        for (int i = 0; i < kEntries; ++i) {
          int const position = positions[word * Bitmap::kWordElements + kStreams * i + s];
          mask |= uint32_t{stored[position]} << i;
          *next = value[position];
          next += stored[position];
        }
        tile.masks[(word * kStreams + s) * kLanes + lane] = static_cast<uint16_t>(mask);
      }
    }
}

int64_t select_two_of_four(DenseView const& x, Role role, uint8_t const* channel_order, uint32_t* masks, int threads) {
  int const padded = format::padded_head_dim(x.head_dim), words = padded / 32;
  uint32_t const nan = nan_key(x.dtype);
  bool const is_key = role == Role::kKey;
  int64_t const lines = (x.tokens + Tile::kGroup - 1) / Tile::kGroup;  // of four tokens
  std::atomic<int64_t> lost{0};
  parallel(threads, int64_t{x.batch} * x.kv_heads * lines, [&](TaskQueue& queue) {
    for (int64_t task; (task = queue.next()) >= 0;) {
      int64_t const head = task / lines, first = task % lines * Tile::kGroup;
      int const tokens = static_cast<int>(std::min<int64_t>(Tile::kGroup, x.tokens - first));
      uint16_t const* rows[Tile::kGroup];
      uint32_t* bits[Tile::kGroup];
      for (int t = 0; t < tokens; ++t) {
        rows[t] = x.row(head, first + t);
        bits[t] = masks + (head * x.tokens + first + t) * words;
        std::fill_n(bits[t], words, 0u);
      }
      int64_t of_task = 0;
      // keep(i, token, channel) for the two largest of four, if they are not zero.
      auto choose = [&](auto&& token_of, auto&& channel_of) {
        uint32_t keys[Tile::kGroup];
        int nonzero = 0;
        for (int i = 0; i < Tile::kGroup; ++i) {
          bool const exists = token_of(i) < tokens && channel_of(i) < x.head_dim;
          keys[i] = exists ? magnitude_key(rows[token_of(i)][channel_of(i)], nan) : 0;
          nonzero += keys[i] != 0;
        }
        Pair const kept = two_largest(keys);
        for (int i : {kept.first, kept.second})
          if (keys[i]) bits[token_of(i)][channel_of(i) / 32] |= 1u << channel_of(i) % 32;
        of_task += std::max(0, nonzero - Tile::kKept);
      };
      if (is_key) {
        uint8_t const* order = channel_order + head * padded;
        for (int t = 0; t < tokens; ++t)
          for (int p = 0; p < padded; p += Tile::kGroup)
            choose([&](int) { return t; }, [&](int i) { return int{order[p + i]}; });
      } else {
        for (int c = 0; c < x.head_dim; ++c) choose([](int i) { return i; }, [&](int) { return c; });
      }
      if (of_task) lost += of_task;
    }
  });
  return lost;
}

}  // namespace cute_kernels::cpu
