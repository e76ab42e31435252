// _C.cuda: the GPU backends. Arguments were checked in Python; pointers are device pointers on the current device.
#if CUTE_KERNELS_CUDA

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cute_kernels/bindings/bindings.hpp"
#include "cute_kernels/compress/compress.hpp"
#include "cute_kernels/compress/pages.hpp"
#include "cute_kernels/dispatch/products.hpp"
#include "cute_kernels/reduce/merge_states.hpp"

namespace py = pybind11;

namespace cute_kernels::bindings {
namespace {

cudaStream_t stream_of(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

compress::DenseView dense_view(uintptr_t x, Strides const& strides, int batch, int kv_heads, int64_t tokens,
                               int head_dim, int dtype) {
  return {to_pointer<void>(x),      strides[0], strides[1], strides[2], batch, kv_heads, tokens, head_dim,
          static_cast<DType>(dtype)};
}

compress::DenseView dense_view(uintptr_t x, Strides const& strides, format::SparseView const& view) {
  return {to_pointer<void>(x), strides[0],  strides[1],    strides[2], view.batch,
          view.kv_heads,       view.tokens, view.head_dim, view.dtype};
}

// channel_scales, token_scales: written by the selection; 0: the codec has none.
compress::TokenScaling token_scaling(int codec, uintptr_t channel_scales, uintptr_t token_scales, uintptr_t refused) {
  return {static_cast<format::CodecId>(codec), to_pointer<uint16_t>(channel_scales), to_pointer<uint16_t>(token_scales),
          to_pointer<int64_t>(refused), channel_scales != 0};
}

void select(uintptr_t x, Strides const& strides, int batch, int kv_heads, int64_t tokens, int head_dim, int dtype,
            int keep, uintptr_t masks, uintptr_t counts, uintptr_t pruned, int codec, uintptr_t channel_scales,
            uintptr_t token_scales, uintptr_t refused, uintptr_t stream) {
  compress::select(dense_view(x, strides, batch, kv_heads, tokens, head_dim, dtype), keep, to_pointer<uint32_t>(masks),
                   to_pointer<int32_t>(counts), to_pointer<void>(pruned),
                   token_scaling(codec, channel_scales, token_scales, refused), stream_of(stream));
}

void channel_scales(uintptr_t x, Strides const& strides, int batch, int kv_heads, int64_t tokens, int head_dim,
                    int dtype, uintptr_t scales, uintptr_t stream) {
  compress::channel_scales(dense_view(x, strides, batch, kv_heads, tokens, head_dim, dtype),
                           to_pointer<uint16_t>(scales), nullptr, nullptr, stream_of(stream));
}

void deal(uintptr_t counts, int heads, int head_dim, bool grouped, uintptr_t channel_order, uintptr_t from_scale,
          uintptr_t to_scale, uintptr_t stream) {
  compress::deal(to_pointer<int32_t>(counts), heads, format::padded_head_dim(head_dim), grouped ? head_dim : 0,
                 to_pointer<uint8_t>(channel_order), to_pointer<uint16_t>(from_scale), to_pointer<uint16_t>(to_scale),
                 stream_of(stream));
}

void balance(uintptr_t masks, uintptr_t channel_order, uintptr_t masks2, uintptr_t channel_order2, int batch,
             int kv_heads, int64_t tokens, int head_dim, uintptr_t token_order, uintptr_t longest, uintptr_t longest2,
             uintptr_t stream) {
  compress::balance({to_pointer<uint32_t>(masks), to_pointer<uint8_t>(channel_order), to_pointer<int32_t>(longest)},
                    {to_pointer<uint32_t>(masks2), to_pointer<uint8_t>(channel_order2), to_pointer<int32_t>(longest2)},
                    batch * kv_heads, tokens, format::padded_head_dim(head_dim), to_pointer<uint8_t>(token_order),
                    stream_of(stream));
}

void offsets(uintptr_t longest, int64_t tiles, uintptr_t counts, int heads, int head_dim, int codec, int tile_format,
             uintptr_t row_offsets, uintptr_t totals, uintptr_t stream) {
  compress::offsets(to_pointer<int32_t>(longest), tiles, to_pointer<int32_t>(counts), heads,
                    format::padded_head_dim(head_dim), static_cast<format::CodecId>(codec),
                    static_cast<format::TileFormatId>(tile_format), to_pointer<int32_t>(row_offsets),
                    to_pointer<int64_t>(totals), stream_of(stream));
}

void pack(uintptr_t x, Strides const& strides, uintptr_t masks, uintptr_t token_scales, int keep, uintptr_t totals,
          int64_t capacity, format::SparseView const& view, uintptr_t stream) {
  compress::pack(dense_view(x, strides, view), to_pointer<uint32_t>(masks), to_pointer<uint16_t>(token_scales), keep,
                 to_pointer<int64_t>(totals), capacity, view, stream_of(stream));
}

void pack_two_of_four(uintptr_t x, Strides const& strides, uintptr_t totals, bool counts_lost,
                      format::SparseView const& view, uintptr_t stream) {
  auto* refused = to_pointer<int64_t>(totals);
  compress::pack_two_of_four(dense_view(x, strides, view), view, refused, counts_lost ? refused + 1 : nullptr,
                             stream_of(stream));
}

std::pair<int, int> slot_scratch(int role, int head_dim) {
  compress::SlotScratch scratch =
      compress::slot_scratch(static_cast<format::Role>(role), format::padded_head_dim(head_dim));
  return {scratch.mask_words, scratch.count_bytes};
}

void select_slots(uintptr_t x, Strides const& strides, int batch, int kv_heads, int64_t tokens, int head_dim, int dtype,
                  int role, int codec, int keep, uintptr_t channel_order, uintptr_t masks, uintptr_t counts,
                  uintptr_t totals, uintptr_t constrained, uintptr_t stream) {
  compress::SlotSelection selection{to_pointer<uint8_t>(channel_order), keep,
                                    to_pointer<uint32_t>(masks),        to_pointer<uint8_t>(counts),
                                    to_pointer<int64_t>(totals),        to_pointer<int64_t>(constrained)};
  compress::select_slots(dense_view(x, strides, batch, kv_heads, tokens, head_dim, dtype),
                         static_cast<format::Role>(role), static_cast<format::CodecId>(codec), selection,
                         stream_of(stream));
}

void select_two_of_four(uintptr_t x, Strides const& strides, int batch, int kv_heads, int64_t tokens, int head_dim,
                        int dtype, int role, uintptr_t channel_order, int keep, uintptr_t masks, uintptr_t counts,
                        int codec, uintptr_t channel_scales, uintptr_t token_scales, uintptr_t refused,
                        uintptr_t stream) {
  compress::select_two_of_four(dense_view(x, strides, batch, kv_heads, tokens, head_dim, dtype),
                               static_cast<format::Role>(role), to_pointer<uint8_t>(channel_order), keep,
                               to_pointer<uint32_t>(masks), to_pointer<int32_t>(counts),
                               token_scaling(codec, channel_scales, token_scales, refused), stream_of(stream));
}

void order_slots(uintptr_t key_counts, int key_codec, uintptr_t key_longest, uintptr_t value_counts, int value_codec,
                 uintptr_t value_longest, int64_t tiles, uintptr_t token_order, uintptr_t stream) {
  compress::order_slots(
      {to_pointer<uint8_t>(key_counts), to_pointer<int32_t>(key_longest)}, static_cast<format::CodecId>(key_codec),
      {to_pointer<uint8_t>(value_counts), to_pointer<int32_t>(value_longest)},
      static_cast<format::CodecId>(value_codec), tiles, to_pointer<uint8_t>(token_order), stream_of(stream));
}

void pack_slots(uintptr_t x, Strides const& strides, uintptr_t masks, uintptr_t totals, int64_t capacity,
                format::SparseView const& view, uintptr_t tile_rows, uintptr_t dropped, uintptr_t stream) {
  compress::pack_slots(dense_view(x, strides, view), to_pointer<uint32_t>(masks), to_pointer<int64_t>(totals), capacity,
                       view, to_pointer<int32_t>(tile_rows), to_pointer<int64_t>(dropped), stream_of(stream));
}

void decompress(format::SparseView const& view, uintptr_t out, uintptr_t stream) {
  compress::decompress(view, to_pointer<void>(out), stream_of(stream));
}

compress::DenseView rows_of_pool(format::SparseView const& view, uintptr_t x, Strides const& strides, int batch,
                                 int64_t tokens) {
  return {to_pointer<void>(x), strides[0], strides[1],    strides[2], batch,
          view.kv_heads,       tokens,     view.head_dim, view.dtype};
}

void store(compress::Pool const& pool, uintptr_t k, Strides const& k_strides, uintptr_t v, Strides const& v_strides,
           int batch, int64_t tokens, uintptr_t sequences, uintptr_t first_tiles, int new_order, int64_t part,
           uintptr_t scratch, uintptr_t stream) {
  compress::store(pool, rows_of_pool(pool.keys, k, k_strides, batch, tokens),
                  rows_of_pool(pool.values, v, v_strides, batch, tokens),
                  {to_pointer<int32_t>(sequences), to_pointer<int32_t>(first_tiles)},
                  static_cast<compress::NewOrder>(new_order), part, to_pointer<void>(scratch), stream_of(stream));
}

compress::Windows make_windows(uintptr_t keys, uintptr_t values, uintptr_t lengths, uintptr_t arrivals, int capacity,
                               int recent, bool stores_full, uintptr_t prepared, uintptr_t preparation) {
  if (keys % 16 || values % 16 || preparation % 16) throw std::invalid_argument("windows must be aligned to 16 bytes");
  if (!prepared != !preparation || (prepared && stores_full))
    throw std::invalid_argument("tiles are prepared in both tensors, and not where full ones are stored");
  return {to_pointer<uint16_t>(keys),
          to_pointer<uint16_t>(values),
          to_pointer<int32_t>(lengths),
          to_pointer<int32_t>(arrivals),
          capacity,
          recent,
          stores_full,
          to_pointer<int32_t>(prepared),
          to_pointer<uint8_t>(preparation)};
}

void append(compress::Pool const& pool, compress::Windows const& windows, uintptr_t lengths, uintptr_t k,
            Strides const& k_strides, uintptr_t v, Strides const& v_strides, int batch, int64_t tokens,
            uintptr_t sequences, uintptr_t own_lengths, int rank, int ranks, uintptr_t stream) {
  if (ranks < 1 || rank < 0 || rank >= ranks) throw std::invalid_argument("rank must be one of the ranks");
  compress::append(pool, windows, to_pointer<int32_t>(lengths), rows_of_pool(pool.keys, k, k_strides, batch, tokens),
                   rows_of_pool(pool.values, v, v_strides, batch, tokens), to_pointer<int32_t>(sequences),
                   {to_pointer<int32_t>(own_lengths), rank, ranks}, stream_of(stream));
}

void load(compress::Pool const& pool, int sequence, int first_tile, int tiles, uintptr_t keys, uintptr_t values,
          uintptr_t stream) {
  compress::load(pool, {sequence, first_tile, tiles}, to_pointer<void>(keys), to_pointer<void>(values),
                 stream_of(stream));
}

product::DenseOperand dense_operand(uintptr_t data, Strides const& strides, DType dtype) {
  product::DenseOperand dense{};
  dense.data = to_pointer<void>(data);
  dense.stride_batch = strides[0];
  dense.stride_head = strides[1];
  dense.stride_token = strides[2];
  dense.dtype = dtype;
  return dense;
}

void sparse_qk(format::SparseView const& view, uintptr_t q, Strides const& q_strides, int q_heads, int q_tokens,
               float scale, uintptr_t out, int out_dtype, std::string const& backend, int stages_ahead,
               uintptr_t stream) {
  dispatch::Product product{};
  product.sparse = view;
  product.dense = dense_operand(q, q_strides, view.dtype);
  product.query_heads = q_heads;
  product.query_tokens = q_tokens;
  product.out = to_pointer<void>(out);
  product.out_dtype = static_cast<DType>(out_dtype);
  product.scale = scale;
  dispatch::run(product, {}, backend, make_tuning(stages_ahead), stream_of(stream));
}

void sparse_av(format::SparseView const& view, uintptr_t p, Strides const& p_strides, int p_dtype, int q_heads,
               int q_tokens, uintptr_t out, py::object const& new_empty, std::string const& backend, int stages_ahead,
               uintptr_t stream) {
  dispatch::Product product{};
  product.sparse = view;
  product.dense = dense_operand(p, p_strides, static_cast<DType>(p_dtype));
  product.query_heads = q_heads;
  product.query_tokens = q_tokens;
  product.out = to_pointer<void>(out);
  product.out_dtype = view.dtype;
  product.scale = 1.f;
  Scratch scratch(new_empty);
  dispatch::run(product, std::ref(scratch), backend, make_tuning(stages_ahead), stream_of(stream));
}

void merge_states(uintptr_t outs, uintptr_t lses, int64_t out_stride, int64_t lse_stride, uintptr_t out, uintptr_t lse,
                  int states, int64_t rows, int head_dim, int dtype, uintptr_t stream) {
  reduce::merge_states(
      {to_pointer<void>(outs), to_pointer<float>(lses), out_stride, lse_stride, to_pointer<void>(out),
       to_pointer<float>(lse), states, rows, head_dim, static_cast<DType>(dtype), static_cast<DType>(dtype)},
      stream_of(stream));
}

}  // namespace

void bind_cuda(py::module_& m) {
  using namespace py::literals;
  auto cuda = m.def_submodule("cuda", "GPU backends: device pointers, sizes, the stream");
  cuda.def("select", &select, "x"_a, "strides"_a, "batch"_a, "kv_heads"_a, "tokens"_a, "head_dim"_a, "dtype"_a,
           "keep"_a, "masks"_a, "counts"_a, "pruned"_a, "codec"_a, "channel_scales"_a, "token_scales"_a, "refused"_a,
           "stream"_a, "codec, if it has scales: writes those of channels and of tokens, and counts what is refused");
  cuda.def("channel_scales", &channel_scales, "x"_a, "strides"_a, "batch"_a, "kv_heads"_a, "tokens"_a, "head_dim"_a,
           "dtype"_a, "scales"_a, "stream"_a, "bf16 of a narrow codec, by channel, from the first tokens");
  cuda.def("balance", &balance, "masks"_a, "channel_order"_a, "masks2"_a, "channel_order2"_a, "batch"_a, "kv_heads"_a,
           "tokens"_a, "head_dim"_a, "token_order"_a, "longest"_a, "longest2"_a, "stream"_a);
  cuda.def(
      "deal", &deal, "counts"_a, "heads"_a, "head_dim"_a, "grouped"_a, "channel_order"_a, "from_scale"_a, "to_scale"_a,
      "stream"_a,
      "grouped: to groups of four neighbours, not to classes. Scales of channels: by channel and by position, or 0");
  cuda.def("offsets", &offsets, "longest"_a, "tiles"_a, "counts"_a, "heads"_a, "head_dim"_a, "codec"_a, "tile_format"_a,
           "row_offsets"_a, "totals"_a, "stream"_a);
  cuda.def("pack", &pack, "x"_a, "strides"_a, "masks"_a, "token_scales"_a, "keep"_a, "totals"_a, "capacity"_a, "view"_a,
           "stream"_a);
  cuda.def("pack_two_of_four", &pack_two_of_four, "x"_a, "strides"_a, "totals"_a, "counts_lost"_a, "view"_a, "stream"_a,
           "totals: values that the codec cannot store, and, if asked for, nonzeros that are left out");
  cuda.def("slot_scratch", &slot_scratch, "role"_a, "head_dim"_a,
           "Words of masks and bytes of counts that select_slots writes for a tile");
  cuda.def("select_slots", &select_slots, "x"_a, "strides"_a, "batch"_a, "kv_heads"_a, "tokens"_a, "head_dim"_a,
           "dtype"_a, "role"_a, "codec"_a, "keep"_a, "channel_order"_a, "masks"_a, "counts"_a, "totals"_a,
           "constrained"_a, "stream"_a,
           "adds to totals: values stored, those that the codec cannot store, with keep 0 nonzeros beyond two of four");
  cuda.def("select_two_of_four", &select_two_of_four, "x"_a, "strides"_a, "batch"_a, "kv_heads"_a, "tokens"_a,
           "head_dim"_a, "dtype"_a, "role"_a, "channel_order"_a, "keep"_a, "masks"_a, "counts"_a, "codec"_a,
           "channel_scales"_a, "token_scales"_a, "refused"_a, "stream"_a, "as select, by a rule of two of four");
  cuda.def("order_slots", &order_slots, "key_counts"_a, "key_codec"_a, "key_longest"_a, "value_counts"_a,
           "value_codec"_a, "value_longest"_a, "tiles"_a, "token_order"_a, "stream"_a);
  cuda.def("pack_slots", &pack_slots, "x"_a, "strides"_a, "masks"_a, "totals"_a, "capacity"_a, "view"_a, "tile_rows"_a,
           "dropped"_a, "stream"_a, "tile_rows, dropped: where tiles lie anywhere, or 0");
  cuda.def("decompress", &decompress, "view"_a, "out"_a, "stream"_a);
  py::class_<compress::Windows>(cuda, "Windows", "The dense windows of a pool's sequences, as pointers and sizes")
      .def(py::init(&make_windows), "keys"_a, "values"_a, "lengths"_a, "arrivals"_a, "capacity"_a, "recent"_a,
           "stores_full"_a, "prepared"_a = 0, "preparation"_a = 0);
  cuda.def("preparation_bytes", &compress::preparation_bytes, "padded_head_dim"_a);
  cuda.def("store_scratch_bytes", &compress::store_scratch_bytes, "pool"_a, "batch"_a, "part"_a);
  cuda.def("store", &store, "pool"_a, "k"_a, "k_strides"_a, "v"_a, "v_strides"_a, "batch"_a, "tokens"_a, "sequences"_a,
           "first_tiles"_a, "new_order"_a, "part"_a, "scratch"_a, "stream"_a);
  cuda.def("append", &append, "pool"_a, "windows"_a, "lengths"_a, "k"_a, "k_strides"_a, "v"_a, "v_strides"_a, "batch"_a,
           "tokens"_a, "sequences"_a, "own_lengths"_a, "rank"_a, "ranks"_a, "stream"_a);
  cuda.def("load", &load, "pool"_a, "sequence"_a, "first_tile"_a, "tiles"_a, "keys"_a, "values"_a, "stream"_a);
  cuda.def("sparse_qk", &sparse_qk, "view"_a, "q"_a, "q_strides"_a, "q_heads"_a, "q_tokens"_a, "scale"_a, "out"_a,
           "out_dtype"_a, "backend"_a, "stages_ahead"_a, "stream"_a);
  cuda.def("sparse_av", &sparse_av, "view"_a, "p"_a, "p_strides"_a, "p_dtype"_a, "q_heads"_a, "q_tokens"_a, "out"_a,
           "new_empty"_a, "backend"_a, "stages_ahead"_a, "stream"_a);
  cuda.def("merge_states", &merge_states, "outs"_a, "lses"_a, "out_stride"_a, "lse_stride"_a, "out"_a, "lse"_a,
           "states"_a, "rows"_a, "head_dim"_a, "dtype"_a, "stream"_a);
}

}  // namespace cute_kernels::bindings

#endif  // CUTE_KERNELS_CUDA
