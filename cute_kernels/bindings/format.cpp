// _C.format: the numbers and the permutation of the format, for the tests and for whoever reads the storage in Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cute_kernels/bindings/bindings.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/format/storage.hpp"

namespace cute_kernels::bindings {
namespace {

namespace py = pybind11;
using format::Role;
using format::SparseView;

Role to_role(int role) {
  if (role != static_cast<int>(Role::kKey) && role != static_cast<int>(Role::kValue))
    throw std::invalid_argument("role is 0 (key) or 1 (value), not " + std::to_string(role));
  return static_cast<Role>(role);
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

SparseView make_view(uintptr_t blocks, uintptr_t row_offsets, uintptr_t token_order, uintptr_t channel_order, int role,
                     int dtype, int batch, int kv_heads, int64_t tokens, int head_dim, int max_tile_rows) {
  const int padded = format::padded_head_dim(head_dim);
  if (padded == 0)
    throw std::invalid_argument("head_dim is a multiple of 8 up to " + std::to_string(format::kMaxHeadDim) + ", not " +
                                std::to_string(head_dim));
  return {reinterpret_cast<const uint32_t*>(blocks),
          reinterpret_cast<const int32_t*>(row_offsets),
          reinterpret_cast<const uint8_t*>(token_order),
          reinterpret_cast<const uint8_t*>(channel_order),
          to_role(role),
          static_cast<format::DType>(dtype),
          batch,
          kv_heads,
          tokens,
          head_dim,
          padded,
          max_tile_rows};
}

SparseView make_paged_view(uintptr_t blocks, uintptr_t tile_rows, uintptr_t token_order, uintptr_t channel_order,
                           int role, int dtype, int sequences, int kv_heads, int head_dim, int max_tile_rows,
                           uintptr_t page_table, int pages_per_sequence, int tiles_per_page, int slot_rows,
                           uintptr_t rows_before) {
  int64_t tokens = int64_t{pages_per_sequence} * tiles_per_page * format::kTileTokens;
  SparseView view = make_view(blocks, tile_rows, token_order, channel_order, role, dtype, sequences, kv_heads, tokens,
                              head_dim, max_tile_rows);
  view.pages = {reinterpret_cast<const int32_t*>(page_table), pages_per_sequence, tiles_per_page, slot_rows,
                reinterpret_cast<const int32_t*>(rows_before)};
  return view;
}

}  // namespace

void bind_format(py::module_& m) {
  using namespace py::literals;
  auto f = m.def_submodule("format", "What a compressed tile is, see cute_kernels/format");
  f.attr("TILE_TOKENS") = format::kTileTokens;
  f.attr("LANES") = format::kLanes;
  f.attr("ROW_BYTES") = format::kRowBytes;
  f.attr("WORD_ELEMENTS") = format::kWordElements;
  f.attr("CLASSES") = format::kClasses;
  f.attr("VALUE_STREAMS") = format::Codec16::kStreams;
  f.attr("HEAD_DIMS") = head_dims();
  f.def("padded_head_dim", [](int head_dim) { return format::padded_head_dim(head_dim); }, "head_dim"_a,
        "The head_dim that tiles hold `head_dim` channels in, 0 if there is none");
  f.def("bitmap_rows", [](int head_dim) { return format::bitmap_rows(checked_padded(head_dim)); }, "padded_head_dim"_a);
  f.def("max_tile_rows", [](int head_dim) { return format::max_tile_rows<format::Codec16>(checked_padded(head_dim)); },
        "padded_head_dim"_a, "Rows of a tile without a zero");
  f.def("bitmap_bit", [](int element) { return format::bitmap_bit(element); }, "element"_a);
  f.def(
      "element_table",
      [](int role, int head_dim) { return cpu::element_table(to_role(role), checked_padded(head_dim)); }, "role"_a,
      "padded_head_dim"_a, "[lane * lane_elements + element] -> token_position * padded_head_dim + channel_position");
  f.def(
      "stream_of",
      [](int role, int token_group, int channel_class) {
        format::Stream stream = format::stream_of(to_role(role), token_group, channel_class);
        return std::make_pair(stream.lane, stream.index);
      },
      "role"_a, "token_group"_a, "channel_class"_a);

  py::class_<SparseView>(m, "SparseView", "Compressed storage as pointers and sizes; owns nothing")
      .def(py::init(&make_view), "blocks"_a, "row_offsets"_a, "token_order"_a, "channel_order"_a, "role"_a, "dtype"_a,
           "batch"_a, "kv_heads"_a, "tokens"_a, "head_dim"_a, "max_tile_rows"_a)
      .def_static("paged", &make_paged_view, "blocks"_a, "tile_rows"_a, "token_order"_a, "channel_order"_a, "role"_a,
                  "dtype"_a, "sequences"_a, "kv_heads"_a, "head_dim"_a, "max_tile_rows"_a, "page_table"_a,
                  "pages_per_sequence"_a, "tiles_per_page"_a, "slot_rows"_a, "rows_before"_a,
                  "The storage of a pool of pages, see format/storage.hpp");
}

}  // namespace cute_kernels::bindings
