#include "cute_kernels/cpu/two_of_four.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/cpu/element_codec.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/cpu/parallel.hpp"
#include "cute_kernels/format/group_order.hpp"
#include "cute_kernels/format/head_dim.hpp"

namespace cute_kernels::cpu {
namespace {

using format::kLanes;
using format::Role;
using Tile = format::TwoOfFourGroups;
using format::TwoOfFourBitmapTile;
using format::TwoOfFourTile;

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

template <class Codec>
constexpr uint32_t kValueMask = (1u << Codec::kValueBits) - 1;

// f(position, bits of the value) for every stored value of a block.
template <class Codec, class F>
void for_values(TwoOfFourTile, SparseView const& view, uint32_t const* block, F&& f) {
  int const padded = view.padded_head_dim, count = Tile::lane_groups(padded);
  uint32_t const* values = block + TwoOfFourTile::first_value_row<Codec>(padded) * kLanes;
  LaneGroup const* groups = lane_groups(view.role, padded).data();
  for (int lane = 0; lane < kLanes; ++lane)
    for (int group = 0; group < count; ++group, ++groups) {
      uint32_t const kept = block[groups->metadata_word] >> groups->metadata_bit;
      uint32_t const word = values[TwoOfFourTile::value_row<Codec>(group) * kLanes + lane];
      for (int i = 0; i < Tile::kKept; ++i)
        f(groups->position[kept >> (2 * i) & 3], word >> TwoOfFourTile::first_bit<Codec>(group, i) & kValueMask<Codec>);
    }
}

template <class Codec, class F>
void for_values(TwoOfFourBitmapTile, SparseView const& view, uint32_t const* block, F&& f) {
  using Packed = TwoOfFourBitmapTile::Packed<Codec>;
  int const padded = view.padded_head_dim, count = Tile::lane_groups(padded);
  uint32_t const* bitmap = block + Tile::metadata_rows(padded) * kLanes;
  uint32_t const* values = block + TwoOfFourBitmapTile::first_value_row<Codec>(padded) * kLanes;
  LaneGroup const* groups = lane_groups(view.role, padded).data();
  for (int lane = 0; lane < kLanes; ++lane) {
    int taken[Packed::kStreams] = {};
    for (int group = 0; group < count; ++group, ++groups) {
      uint32_t const kept = block[groups->metadata_word] >> groups->metadata_bit;
      for (int i = 0; i < Tile::kKept; ++i) {
        int const slot = TwoOfFourBitmapTile::slot(group, i), s = TwoOfFourBitmapTile::stream<Codec>(slot);
        uint32_t const word = bitmap[TwoOfFourBitmapTile::bitmap_word(slot) * kLanes + lane];
        if (!(word >> TwoOfFourBitmapTile::bitmap_bit<Codec>(slot) & 1)) continue;
        int const rank = taken[s]++;
        f(groups->position[kept >> (2 * i) & 3],
          Packed::extract(values[Packed::value_row(s, rank) * kLanes + lane], s, rank));
      }
    }
  }
}

// f(lane, group, slot of the group, position) for every slot of a tile, whose metadata it writes.
template <class F>
void write_groups(SparseView const& view, uint16_t const* dense, uint32_t* block, F&& f) {
  int const padded = view.padded_head_dim, count = Tile::lane_groups(padded);
  LaneGroup const* groups = lane_groups(view.role, padded).data();
  uint32_t const nan = nan_key(view.dtype);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int group = 0; group < count; ++group, ++groups) {
      uint32_t keys[Tile::kGroup];
      for (int i = 0; i < Tile::kGroup; ++i) keys[i] = magnitude_key(dense[groups->position[i]], nan);
      Pair const kept = two_largest(keys);
      block[groups->metadata_word] |= static_cast<uint32_t>(kept.first | kept.second << 2) << groups->metadata_bit;
      for (int i = 0; i < Tile::kKept; ++i) f(lane, group, i, groups->position[i ? kept.second : kept.first]);
    }
}

template <class Codec>
int write_values(TwoOfFourTile, SparseView const& view, uint16_t const* dense, TileScales const& scales, int,
                 uint32_t* block) {
  uint32_t* values = block + TwoOfFourTile::first_value_row<Codec>(view.padded_head_dim) * kLanes;
  write_groups(view, dense, block, [&](int lane, int group, int i, int index) {
    uint16_t const x = dense[index] & 0x7fff ? dense[index] : 0;
    values[TwoOfFourTile::value_row<Codec>(group) * kLanes + lane] |= encode_element<Codec>(view, scales, x, index)
                                                                      << TwoOfFourTile::first_bit<Codec>(group, i);
  });
  return 0;
}

// Streams that are too long for the rows lose the values of least magnitude, of equal ones the later. Returns how many.
template <class Codec>
int write_values(TwoOfFourBitmapTile, SparseView const& view, uint16_t const* dense, TileScales const& scales, int rows,
                 uint32_t* block) {
  using Packed = TwoOfFourBitmapTile::Packed<Codec>;
  struct Value {
    int slot;
    uint32_t bits;
  };
  int const padded = view.padded_head_dim, first_row = TwoOfFourBitmapTile::first_value_row<Codec>(padded);
  uint32_t* bitmap = block + Tile::metadata_rows(padded) * kLanes;
  uint32_t* values = block + first_row * kLanes;
  size_t const most = Packed::most_values(rows - first_row);
  std::vector<Value> streams[kLanes][Packed::kStreams];
  write_groups(view, dense, block, [&](int lane, int group, int i, int index) {
    int const slot = TwoOfFourBitmapTile::slot(group, i);
    if (dense[index] & 0x7fff)
      streams[lane][TwoOfFourBitmapTile::stream<Codec>(slot)].push_back(
          {slot, encode_element<Codec>(view, scales, dense[index], index)});
  });
  int dropped = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    for (int s = 0; s < Packed::kStreams; ++s) {
      std::vector<Value>& stream = streams[lane][s];
      for (; stream.size() > most; ++dropped) {
        auto least = stream.begin();
        for (auto at = stream.begin(); at != stream.end(); ++at)
          if (Codec::magnitude(at->bits) <= Codec::magnitude(least->bits)) least = at;
        stream.erase(least);
      }
      for (int rank = 0; rank < static_cast<int>(stream.size()); ++rank) {
        auto const [slot, bits] = stream[rank];
        bitmap[TwoOfFourBitmapTile::bitmap_word(slot) * kLanes + lane] |=
            1u << TwoOfFourBitmapTile::bitmap_bit<Codec>(slot);
        values[Packed::value_row(s, rank) * kLanes + lane] |= Packed::place(bits, s, rank);
      }
    }
  return dropped;
}

// f(tile format, codec)
template <class F>
void visit(SparseView const& view, F&& f) {
  format::visit_codec(view.codec, [&](auto codec) {
    if (view.tile_format == TwoOfFourTile::kId)
      f(TwoOfFourTile{}, codec);
    else
      f(TwoOfFourBitmapTile{}, codec);
  });
}

// Of the channels in a token's mask the largest remain, ties to the lower channel.
void keep_largest(uint16_t const* x, int head_dim, uint32_t nan, int keep, uint32_t* mask) {
  std::pair<uint32_t, int> kept[format::kMaxHeadDim];  // what is larger comes first
  int count = 0;
  for (int c = 0; c < head_dim; ++c)
    if (mask[c / 32] >> c % 32 & 1) kept[count++] = {~magnitude_key(x[c], nan), c};
  if (count <= keep) return;
  std::nth_element(kept, kept + keep, kept + count);
  for (int i = keep; i < count; ++i) mask[kept[i].second / 32] &= ~(1u << kept[i].second % 32);
}

}  // namespace

std::vector<LaneGroup> const& lane_groups(Role role, int padded_head_dim) {
  return format::visit_head_dim(padded_head_dim, [&](auto head_dim) -> std::vector<LaneGroup> const& {
    static std::vector<LaneGroup> const keys = make_lane_groups<Role::kKey, head_dim()>();
    static std::vector<LaneGroup> const values = make_lane_groups<Role::kValue, head_dim()>();
    return role == Role::kKey ? keys : values;
  });
}

int write_two_of_four(SparseView const& view, uint16_t const* dense, TileScales const& scales, int rows,
                      uint32_t* block) {
  int dropped = 0;
  visit(view, [&](auto tile_format, auto codec) {
    std::fill_n(block, rows * kLanes, 0u);
    if constexpr (codec.kHasScales) std::memcpy(block + view.scale_row() * kLanes, scales.tokens, format::kRowBytes);
    dropped = write_values<decltype(codec)>(tile_format, view, dense, scales, rows, block);
  });
  return dropped;
}

void read_two_of_four(SparseView const& view, uint32_t const* block, TileScales const& scales, uint16_t* dense) {
  std::fill_n(dense, format::kTileTokens * view.padded_head_dim, uint16_t{0});
  visit(view, [&](auto tile_format, auto codec) {
    using Codec = decltype(codec);
    for_values<Codec>(tile_format, view, block, [&](int position, uint32_t bits) {
      dense[position] = decode_element<Codec>(view, scales, bits, position);
    });
  });
}

void unpack_two_of_four(SparseView const& view, uint32_t const* block, UnpackedTile const& tile) {
  using Bitmap = format::BitmapTile;
  constexpr int kEntries = Bitmap::kWordElements / kStreams;  // of a stream in a mask
  int const elements = Bitmap::lane_elements(view.padded_head_dim);
  std::vector<float> value(static_cast<size_t>(format::kTileTokens) * view.padded_head_dim);
  std::vector<uint8_t> stored(value.size());
  visit(view, [&](auto tile_format, auto codec) {
    using Codec = decltype(codec);
    for_values<Codec>(tile_format, view, block, [&](int position, uint32_t bits) {
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

int64_t select_two_of_four(DenseView const& x, Role role, uint8_t const* channel_order, int keep, uint32_t* masks,
                           int threads) {
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
      for (int t = 0; t < tokens && keep > 0; ++t) keep_largest(rows[t], x.head_dim, nan, keep, bits[t]);
      if (of_task) lost += of_task;
    }
  });
  return lost;
}

void order_slots(SlotOperand& keys, SlotOperand& values, int64_t heads, int64_t tokens, int padded,
                 uint8_t* token_order, int threads) {
  using format::kFour, format::kTileGroups, format::kTileTokens, format::kClasses;
  int64_t const tiles = (tokens + kTileTokens - 1) / kTileTokens;
  auto streams_of = [](SlotOperand const& operand) {
    return operand.masks
               ? format::visit_codec(operand.codec,
                                     [](auto codec) { return TwoOfFourBitmapTile::Packed<decltype(codec)>::kStreams; })
               : 0;
  };
  int const key_streams = streams_of(keys), value_streams = streams_of(values);
  std::atomic<int64_t> stored[2] = {};
  parallel(threads, heads * tiles, [&](TaskQueue& queue) {
    for (int64_t tile; (tile = queue.next()) >= 0;) {
      int64_t const head = tile / tiles, first_token = tile % tiles * kTileTokens;
      int const count = static_cast<int>(std::min<int64_t>(kTileTokens, tokens - first_token));
      // f(token, channel position) for what is kept. Returns how many.
      auto for_kept = [&](SlotOperand const& operand, auto&& f) {
        int of_tile = 0;
        uint8_t const* order = operand.channel_order + head * padded;
        for (int t = 0; t < count && operand.masks; ++t) {
          uint32_t const* mask = operand.masks + (head * tokens + first_token + t) * (padded / 32);
          for (int p = 0; p < padded; ++p)
            if (mask[order[p] / 32] >> order[p] % 32 & 1) f(t, p), ++of_tile;
        }
        return of_tile;
      };
      format::SlotCounts counts{};
      stored[0] +=
          for_kept(keys, [&](int t, int p) { ++counts.keys[t][p / kFour % format::slot_classes(key_streams)]; });
      stored[1] += for_kept(values, [&](int t, int p) { ++counts.values[t / kFour][p % kClasses]; });
      uint8_t* order = token_order + tile * kTileTokens;
      format::choose_group_order(counts, key_streams, value_streams, order);
      if (key_streams) keys.longest[tile] = format::longest_key_slots(counts, order);
      if (value_streams) values.longest[tile] = format::longest_value_slots(counts, value_streams, order);
    }
  });
  keys.stored = stored[0], values.stored = stored[1];
}

}  // namespace cute_kernels::cpu
