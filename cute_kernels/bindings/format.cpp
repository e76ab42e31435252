// _C.format: the numbers, the permutation and the codecs of the format, which Python reads the storage with.
// _C.SparseView.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cute_kernels/bindings/bindings.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/cpu/two_of_four.hpp"
#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::bindings {
namespace {

namespace py = pybind11;
using cpu::TileFormat;
using format::CodecId;
using format::Role;
using format::SparseView;
using format::TileFormatId;
using format::TwoOfFourBitmapTile;
using format::TwoOfFourTile;

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

Role to_role(int role) {
  if (role != static_cast<int>(Role::kKey) && role != static_cast<int>(Role::kValue))
    throw std::invalid_argument("role is 0 (key) or 1 (value), not " + std::to_string(role));
  return static_cast<Role>(role);
}

DType to_dtype(int dtype) {
  for (DType known : kDTypes)
    if (static_cast<int>(known) == dtype) return known;
  throw std::invalid_argument("dtype is one of DTYPES, not " + std::to_string(dtype));
}

// Unchecked: visit_codec throws for a number that no codec has.
CodecId to_codec(int codec) { return static_cast<CodecId>(codec); }

constexpr TileFormatId kTileFormats[] = {TileFormatId::kBitmap, TileFormatId::kTwoOfFour,
                                         TileFormatId::kTwoOfFourBitmap};

TileFormatId to_tile_format(int tile_format) {
  for (TileFormatId known : kTileFormats)
    if (static_cast<int>(known) == tile_format) return known;
  throw std::invalid_argument("tile_format is one of TILE_FORMATS, not " + std::to_string(tile_format));
}

// Name -> number, as Python and files know them.
py::dict dtype_numbers() {
  py::dict numbers;
  for (DType dtype : kDTypes) numbers[dtype_name(dtype)] = static_cast<int>(dtype);
  return numbers;
}

py::dict codec_ids() {
  py::dict numbers;
  for (CodecId id : {CodecId::kFp16, CodecId::kBf16, CodecId::kFp8, CodecId::kInt8, CodecId::kInt4})
    numbers[format::codec_name(id)] = static_cast<int>(id);
  return numbers;
}

// Code -> number of a codec with scales, NaN where there is no such code; empty without scales.
std::vector<float> number_table(CodecId id) {
  return format::visit_codec(id, [](auto codec) {
    std::vector<float> numbers;
    if constexpr (decltype(codec)::kHasScales)
      for (uint32_t code = 0; code < 1u << codec.kValueBits; ++code) numbers.push_back(codec.number(code));
    return numbers;
  });
}

// The codes that compression may store.
std::vector<bool> codes(CodecId id) {
  return format::visit_codec(id, [](auto codec) {
    std::vector<bool> valid;
    if constexpr (decltype(codec)::kHasScales)
      for (uint32_t code = 0; code < 1u << codec.kValueBits; ++code) valid.push_back(codec.is_code(code));
    return valid;
  });
}

int value_bits(CodecId id) {
  return format::visit_codec(id, [](auto codec) { return codec.kValueBits; });
}

int scale_rows(CodecId id) {
  return format::visit_codec(id, [](auto codec) { return codec.kScaleRows; });
}

// f(codec with the streams that a lane of the tile format has)
template <class F>
auto visit_packed(CodecId id, TileFormatId tile_format, F&& f) {
  return format::visit_codec(id, [&](auto codec) {
    if (tile_format == TwoOfFourBitmapTile::kId) return f(TwoOfFourBitmapTile::Packed<decltype(codec)>{});
    return f(codec);
  });
}

int value_streams(CodecId id, TileFormatId tile_format) {
  return visit_packed(id, tile_format, [](auto codec) { return codec.kStreams; });
}

int value_rows(int longest, CodecId id, TileFormatId tile_format) {
  if (longest < 0) throw std::invalid_argument("longest is at least 0, not " + std::to_string(longest));
  return visit_packed(id, tile_format, [&](auto codec) { return codec.value_rows(longest); });
}

int scale_row(int padded, TileFormatId id) {
  return format::visit_tile_format(id, [&](auto tile_format) { return tile_format.scale_row(padded); });
}

int max_tile_rows(int padded, CodecId id, TileFormatId tile_format) {
  return format::visit_codec(id, [&](auto codec) {
    using Codec = decltype(codec);
    if (tile_format == TwoOfFourTile::kId) return TwoOfFourTile::tile_rows<Codec>(padded);
    if (tile_format == TwoOfFourBitmapTile::kId) return TwoOfFourBitmapTile::max_tile_rows<Codec>(padded);
    return TileFormat::max_tile_rows<Codec>(padded);
  });
}

int two_of_four_rows(int padded, CodecId id) {
  return format::visit_codec(id, [&](auto codec) { return TwoOfFourTile::tile_rows<decltype(codec)>(padded); });
}

// Of every group of a lane: the positions of its four elements, the word of its metadata, and their lowest bit there.
std::vector<std::vector<int>> two_of_four_groups(Role role, int padded) {
  std::vector<std::vector<int>> table;
  for (cpu::LaneGroup const& group : cpu::lane_groups(role, padded)) {
    table.emplace_back(std::begin(group.position), std::end(group.position));
    table.back().insert(table.back().end(), {group.metadata_word, group.metadata_bit});
  }
  return table;
}

std::pair<int, int> two_of_four_place(int group, int index, CodecId id) {
  return format::visit_codec(id, [&](auto codec) {
    using Codec = decltype(codec);
    return std::make_pair(TwoOfFourTile::value_row<Codec>(group), TwoOfFourTile::first_bit<Codec>(group, index));
  });
}

// Of a lane's slot: its stream, the row of its bitmap word, counted from the first, and its bit there.
std::vector<int> slot_place(int group, int index, CodecId id) {
  int const slot = TwoOfFourBitmapTile::slot(group, index);
  return format::visit_codec(id, [&](auto codec) -> std::vector<int> {
    using Codec = decltype(codec);
    return {TwoOfFourBitmapTile::stream<Codec>(slot), TwoOfFourBitmapTile::bitmap_word(slot),
            TwoOfFourBitmapTile::bitmap_bit<Codec>(slot)};
  });
}

int bitmap_bit(int element, CodecId id) {
  return format::visit_codec(id, [&](auto codec) { return TileFormat::bitmap_bit<codec.kBitDistance>(element); });
}

std::vector<int> head_dims() {
  std::vector<int> dims;
  for (int d = 1; d <= format::kMaxHeadDim; ++d)
    if (format::padded_head_dim(d) == d) dims.push_back(d);
  return dims;
}

int checked_padded(int head_dim) {
  if (head_dim > 0 && format::padded_head_dim(head_dim) == head_dim) return head_dim;
  throw std::invalid_argument("padded head_dim is one of HEAD_DIMS, not " + std::to_string(head_dim));
}

SparseView make_view(uintptr_t blocks, uintptr_t row_offsets, uintptr_t token_order, uintptr_t channel_order,
                     uintptr_t channel_scale, int role, int dtype, int codec, int batch, int kv_heads, int64_t tokens,
                     int head_dim, int max_tile_rows, int tile_format) {
  int const padded = format::padded_head_dim(head_dim);
  if (padded == 0)
    throw std::invalid_argument("head_dim is a multiple of 8 up to " + std::to_string(format::kMaxHeadDim) + ", not " +
                                std::to_string(head_dim));
  format::check_codec(to_codec(codec), to_dtype(dtype));
  if (format::has_scales(to_codec(codec)) != (channel_scale != 0))
    throw std::invalid_argument(std::string("codec ") + format::codec_name(to_codec(codec)) +
                                (channel_scale ? " has no scales" : " needs channel_scale"));
  SparseView view{};
  view.tile_format = to_tile_format(tile_format);
  view.blocks = to_pointer<uint32_t const>(blocks);
  view.row_offsets = to_pointer<int32_t const>(row_offsets);
  view.token_order = to_pointer<uint8_t const>(token_order);
  view.channel_order = to_pointer<uint8_t const>(channel_order);
  view.channel_scale = to_pointer<uint16_t const>(channel_scale);
  view.role = to_role(role);
  view.dtype = to_dtype(dtype);
  view.codec = to_codec(codec);
  view.batch = batch;
  view.kv_heads = kv_heads;
  view.order_heads = kv_heads;
  view.tokens = tokens;
  view.head_dim = head_dim;
  view.padded_head_dim = padded;
  view.max_tile_rows = max_tile_rows;
  return view;
}

SparseView make_paged_view(uintptr_t blocks, uintptr_t tile_rows, uintptr_t token_order, uintptr_t channel_order,
                           uintptr_t channel_scale, int role, int dtype, int codec, int sequences, int kv_heads,
                           int head_dim, int max_tile_rows, uintptr_t page_table, int pages_per_sequence,
                           int tiles_per_page, int slot_rows, int pages, uintptr_t rows_before, bool shares_orders,
                           int tile_format) {
  int64_t const tokens = int64_t{pages_per_sequence} * tiles_per_page * format::kTileTokens;
  SparseView view = make_view(blocks, tile_rows, token_order, channel_order, channel_scale, role, dtype, codec,
                              sequences, kv_heads, tokens, head_dim, max_tile_rows, tile_format);
  if (shares_orders) view.order_heads = 0;
  view.pages.table = to_pointer<int32_t const>(page_table);
  view.pages.pages_per_sequence = pages_per_sequence;
  view.pages.tiles_per_page = tiles_per_page;
  view.pages.slot_rows = slot_rows;
  view.pages.count = pages;
  view.pages.rows_before = to_pointer<int32_t const>(rows_before);
  return view;
}

}  // namespace

void bind_format(py::module_& m) {
  using namespace py::literals;
  auto f = m.def_submodule("format", "What a compressed tile is, see cute_kernels/format");
  f.attr("ROLES") = py::dict("key"_a = static_cast<int>(Role::kKey), "value"_a = static_cast<int>(Role::kValue));
  f.attr("DTYPES") = dtype_numbers();
  f.attr("CODECS") = codec_ids();
  py::dict tile_formats;
  for (TileFormatId id : kTileFormats) tile_formats[format::tile_format_name(id)] = static_cast<int>(id);
  f.attr("TILE_FORMATS") = tile_formats;
  f.attr("TILE_TOKENS") = format::kTileTokens;
  f.attr("LANES") = format::kLanes;
  f.attr("ROW_BYTES") = format::kRowBytes;
  f.attr("WORD_ELEMENTS") = TileFormat::kWordElements;
  f.attr("CLASSES") = format::kClasses;
  f.attr("VALUE_STREAMS") = TileFormat::kStreams;
  f.attr("HEAD_DIMS") = head_dims();
  f.attr("NO_NONZEROS_SCALE") = format::token_scale(0, 1);  // bf16 bits
  f.def(
      "padded_head_dim", [](int head_dim) { return format::padded_head_dim(head_dim); }, "head_dim"_a,
      "The head_dim that tiles hold `head_dim` channels in, 0 if there is none");
  f.def(
      "bitmap_rows", [](int head_dim) { return TileFormat::bitmap_rows(checked_padded(head_dim)); },
      "padded_head_dim"_a);
  f.def(
      "max_tile_rows",
      [](int head_dim, int codec, int tile_format) {
        return max_tile_rows(checked_padded(head_dim), to_codec(codec), to_tile_format(tile_format));
      },
      "padded_head_dim"_a, "codec"_a, "tile_format"_a = 0, "Rows of a tile of which nothing is left out");
  f.def(
      "scale_row",
      [](int head_dim, int tile_format) { return scale_row(checked_padded(head_dim), to_tile_format(tile_format)); },
      "padded_head_dim"_a, "tile_format"_a, "Rows of a tile before its scales, if there are any, and its values");
  f.def(
      "own_codec", [](int dtype) { return static_cast<int>(format::own_codec(to_dtype(dtype))); }, "dtype"_a,
      "The codec that stores x of this dtype bit for bit");
  f.def(
      "stores",
      [](int codec, int dtype) {
        return format::visit_codec(to_codec(codec), [&](auto c) { return c.stores(to_dtype(dtype)); });
      },
      "codec"_a, "dtype"_a, "Whether the codec stores x of this dtype");
  f.def("value_bits", [](int codec) { return value_bits(to_codec(codec)); }, "codec"_a, "Of a stored value");
  f.def(
      "scale_rows", [](int codec) { return scale_rows(to_codec(codec)); }, "codec"_a,
      "Rows of a tile, behind its bitmap, with the scales of its tokens");
  f.def(
      "value_rows",
      [](int longest, int codec, int tile_format) {
        return value_rows(longest, to_codec(codec), to_tile_format(tile_format));
      },
      "longest"_a, "codec"_a, "tile_format"_a = 0, "Value rows of a tile whose longest stream has `longest` values");
  f.def(
      "value_streams",
      [](int codec, int tile_format) { return value_streams(to_codec(codec), to_tile_format(tile_format)); }, "codec"_a,
      "tile_format"_a, "Of a lane");
  f.def(
      "number_table", [](int codec) { return number_table(to_codec(codec)); }, "codec"_a,
      "[code] -> number relative to the scales; empty for a codec without scales");
  f.def(
      "codes", [](int codec) { return codes(to_codec(codec)); }, "codec"_a,
      "[code] -> whether it may be stored; empty for a codec without scales");
  f.def(
      "has_nan", [](int codec) { return format::visit_codec(to_codec(codec), [](auto c) { return c.kHasNan; }); },
      "codec"_a, "Whether the codec stores NaN");
  f.def(
      "scale_index", [](int token_position) { return format::scale_index(token_position); }, "token_position"_a,
      "Where the scale of a token is in a tile's row of scales");
  f.attr("MAX_SCALE_LOG2") = format::kMaxScaleLog2;
  f.attr("MAX_CHANNEL_SCALE_LOG2") = format::kMaxChannelScaleLog2;
  f.def(
      "bitmap_bit", [](int element, int codec) { return bitmap_bit(element, to_codec(codec)); }, "element"_a,
      "codec"_a);
  f.def(
      "element_table",
      [](int role, int head_dim) { return cpu::element_table(to_role(role), checked_padded(head_dim)); }, "role"_a,
      "padded_head_dim"_a, "[lane * lane_elements + element] -> token_position * padded_head_dim + channel_position");
  f.def(
      "two_of_four_rows",
      [](int head_dim, int codec) { return two_of_four_rows(checked_padded(head_dim), to_codec(codec)); },
      "padded_head_dim"_a, "codec"_a, "Rows of every tile of the tile format two_of_four");
  f.def(
      "two_of_four_groups",
      [](int role, int head_dim) { return two_of_four_groups(to_role(role), checked_padded(head_dim)); }, "role"_a,
      "padded_head_dim"_a,
      "[lane * groups of a lane + group] -> the positions of its four elements, word and lowest bit of its metadata");
  f.def(
      "two_of_four_place",
      [](int group, int index, int codec) { return two_of_four_place(group, index, to_codec(codec)); }, "group"_a,
      "index"_a, "codec"_a, "The value row and lowest bit of a lane's value: the first or second of a group");
  f.def(
      "slot_place", [](int group, int index, int codec) { return slot_place(group, index, to_codec(codec)); },
      "group"_a, "index"_a, "codec"_a,
      "Of a lane's slot in the tile format two_of_four_bitmap: its stream, the row and the bit in the bitmap");
  f.def(
      "stream_of",
      [](int role, int token_group, int channel_class) {
        format::Stream stream = TileFormat::stream_of(to_role(role), token_group, channel_class);
        return std::make_pair(stream.lane, stream.index);
      },
      "role"_a, "token_group"_a, "channel_class"_a);

  py::class_<SparseView>(m, "SparseView", "Compressed storage as pointers and sizes; owns nothing")
      .def(py::init(&make_view), "blocks"_a, "row_offsets"_a, "token_order"_a, "channel_order"_a, "channel_scale"_a,
           "role"_a, "dtype"_a, "codec"_a, "batch"_a, "kv_heads"_a, "tokens"_a, "head_dim"_a, "max_tile_rows"_a,
           "tile_format"_a = 0)
      .def_static("paged", &make_paged_view, "blocks"_a, "tile_rows"_a, "token_order"_a, "channel_order"_a,
                  "channel_scale"_a, "role"_a, "dtype"_a, "codec"_a, "sequences"_a, "kv_heads"_a, "head_dim"_a,
                  "max_tile_rows"_a, "page_table"_a, "pages_per_sequence"_a, "tiles_per_page"_a, "slot_rows"_a,
                  "pages"_a, "rows_before"_a, "shares_orders"_a = false, "tile_format"_a = 0,
                  "The storage of a pool of pages, see format/storage.hpp");
}

}  // namespace cute_kernels::bindings
