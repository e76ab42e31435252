// _C.cpu: the CPU backend. Pointers are host pointers.
#include "cute_kernels/cpu/cpu.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>

#include "cute_kernels/bindings/bindings.hpp"
#include "cute_kernels/cpu/kernels.hpp"

namespace cute_kernels::bindings {
namespace {

namespace py = pybind11;
using format::SparseView;
using Unlocked = py::call_guard<py::gil_scoped_release>;

cpu::DenseView dense_view(uintptr_t x, Strides const& strides, int batch, int kv_heads, int64_t tokens, int head_dim,
                          DType dtype) {
  cpu::DenseView view;
  view.data = to_pointer<uint16_t>(x);
  view.stride_batch = strides[0];
  view.stride_head = strides[1];
  view.stride_token = strides[2];
  view.batch = batch;
  view.kv_heads = kv_heads;
  view.tokens = tokens;
  view.head_dim = head_dim;
  view.dtype = dtype;
  return view;
}

// The rows that become `view`, or tiles of it.
cpu::DenseView dense_view(uintptr_t x, Strides const& strides, SparseView const& view, int batch, int64_t tokens) {
  return dense_view(x, strides, batch, view.kv_heads, tokens, view.head_dim, view.dtype);
}

cpu::DenseOperand dense_operand(uintptr_t x, Strides const& strides, int heads, int64_t tokens, DType dtype) {
  cpu::DenseOperand operand;
  operand.data = to_pointer<void>(x);
  operand.stride_batch = strides[0];
  operand.stride_head = strides[1];
  operand.stride_token = strides[2];
  operand.heads = heads;
  operand.tokens = tokens;
  operand.dtype = dtype;
  return operand;
}

void select(uintptr_t x, Strides const& strides, int batch, int kv_heads, int64_t tokens, int head_dim, int dtype,
            int keep, uintptr_t masks, uintptr_t counts, uintptr_t pruned, int threads) {
  cpu::select(dense_view(x, strides, batch, kv_heads, tokens, head_dim, static_cast<DType>(dtype)), keep,
              to_pointer<uint32_t>(masks), to_pointer<int32_t>(counts), to_pointer<uint16_t>(pruned), threads);
}

int64_t select_two_of_four(uintptr_t x, Strides const& strides, int batch, int kv_heads, int64_t tokens, int head_dim,
                           int dtype, int role, uintptr_t channel_order, int keep, uintptr_t masks, int threads) {
  return cpu::select_two_of_four(dense_view(x, strides, batch, kv_heads, tokens, head_dim, static_cast<DType>(dtype)),
                                 static_cast<format::Role>(role), to_pointer<uint8_t>(channel_order), keep,
                                 to_pointer<uint32_t>(masks), threads);
}

void channel_scales(uintptr_t x, Strides const& strides, int batch, int kv_heads, int64_t tokens, int head_dim,
                    int dtype, uintptr_t scales, int threads) {
  cpu::channel_scales(dense_view(x, strides, batch, kv_heads, tokens, head_dim, static_cast<DType>(dtype)),
                      to_pointer<uint16_t>(scales), threads);
}

int64_t token_scales(uintptr_t x, Strides const& strides, int batch, int kv_heads, int64_t tokens, int head_dim,
                     int dtype, uintptr_t masks, int codec, uintptr_t channel_scales, uintptr_t scales, int threads) {
  return cpu::token_scales(dense_view(x, strides, batch, kv_heads, tokens, head_dim, static_cast<DType>(dtype)),
                           to_pointer<uint32_t>(masks), static_cast<format::CodecId>(codec),
                           to_pointer<uint16_t>(channel_scales), to_pointer<uint16_t>(scales), threads);
}

void balance(uintptr_t masks, uintptr_t channel_order, uintptr_t masks2, uintptr_t channel_order2, int batch,
             int kv_heads, int64_t tokens, int head_dim, uintptr_t token_order, uintptr_t longest, uintptr_t longest2,
             int threads) {
  cpu::balance({to_pointer<uint32_t>(masks), to_pointer<uint8_t>(channel_order), to_pointer<int32_t>(longest)},
               {to_pointer<uint32_t>(masks2), to_pointer<uint8_t>(channel_order2), to_pointer<int32_t>(longest2)},
               int64_t{batch} * kv_heads, tokens, format::padded_head_dim(head_dim), to_pointer<uint8_t>(token_order),
               threads);
}

std::pair<int64_t, int64_t> order_slots(uintptr_t key_masks, int key_codec, uintptr_t key_channels,
                                        uintptr_t key_longest, uintptr_t value_masks, int value_codec,
                                        uintptr_t value_channels, uintptr_t value_longest, int64_t heads,
                                        int64_t tokens, int head_dim, uintptr_t token_order, int threads) {
  auto operand = [](uintptr_t masks, int codec, uintptr_t channels, uintptr_t longest) {
    return cpu::SlotOperand{to_pointer<uint32_t>(masks), to_pointer<uint8_t>(channels),
                            static_cast<format::CodecId>(codec), to_pointer<int32_t>(longest)};
  };
  cpu::SlotOperand keys = operand(key_masks, key_codec, key_channels, key_longest);
  cpu::SlotOperand values = operand(value_masks, value_codec, value_channels, value_longest);
  cpu::order_slots(keys, values, heads, tokens, format::padded_head_dim(head_dim), to_pointer<uint8_t>(token_order),
                   threads);
  return {keys.stored, values.stored};
}

void pack(uintptr_t x, Strides const& strides, uintptr_t masks, uintptr_t token_scales, SparseView const& view,
          int threads) {
  cpu::pack(dense_view(x, strides, view, view.batch, view.tokens), to_pointer<uint32_t>(masks),
            to_pointer<uint16_t>(token_scales), view, threads);
}

void pack_slots(uintptr_t x, Strides const& strides, uintptr_t masks, uintptr_t token_scales, SparseView const& view,
                uintptr_t tile_rows, uintptr_t dropped, int threads) {
  cpu::pack_slots(dense_view(x, strides, view, view.batch, view.tokens), to_pointer<uint32_t>(masks),
                  to_pointer<uint16_t>(token_scales), view, to_pointer<int32_t>(tile_rows),
                  to_pointer<int64_t>(dropped), threads);
}

void decompress(SparseView const& view, uintptr_t out, int threads) {
  cpu::decompress(view, to_pointer<uint16_t>(out), threads);
}

void sparse_qk(SparseView const& view, uintptr_t q, Strides const& q_strides, int q_heads, int64_t q_tokens,
               float scale, uintptr_t out, int out_dtype, int threads) {
  cpu::sparse_qk(view, dense_operand(q, q_strides, q_heads, q_tokens, view.dtype), scale, to_pointer<void>(out),
                 static_cast<DType>(out_dtype), threads);
}

void sparse_av(SparseView const& view, uintptr_t p, Strides const& p_strides, int p_dtype, int q_heads,
               int64_t q_tokens, uintptr_t out, int threads) {
  cpu::sparse_av(view, dense_operand(p, p_strides, q_heads, q_tokens, static_cast<DType>(p_dtype)),
                 to_pointer<uint16_t>(out), threads);
}

compress::Pool make_pool(SparseView const& keys, SparseView const& values, int key_keep, int value_keep,
                         uintptr_t dropped, uintptr_t refused, uintptr_t error) {
  compress::Pool pool;
  pool.keys = keys;
  pool.values = values;
  pool.key_keep = key_keep;
  pool.value_keep = value_keep;
  pool.dropped = to_pointer<int64_t>(dropped);
  pool.refused = to_pointer<int64_t>(refused);
  pool.error = to_pointer<int32_t>(error);
  return pool;
}

void store(compress::Pool const& pool, uintptr_t k, Strides const& k_strides, uintptr_t v, Strides const& v_strides,
           int batch, int64_t tokens, uintptr_t sequences, uintptr_t first_tiles, int new_order, int threads) {
  cpu::store(pool, dense_view(k, k_strides, pool.keys, batch, tokens),
             dense_view(v, v_strides, pool.values, batch, tokens),
             {to_pointer<int32_t>(sequences), to_pointer<int32_t>(first_tiles)},
             static_cast<compress::NewOrder>(new_order), threads);
}

void load(compress::Pool const& pool, int sequence, int first_tile, int tiles, uintptr_t keys, uintptr_t values,
          int threads) {
  cpu::load(pool, {sequence, first_tile, tiles}, to_pointer<uint16_t>(keys), to_pointer<uint16_t>(values), threads);
}

}  // namespace

void bind_cpu(py::module_& m) {
  using namespace py::literals;
  py::class_<compress::Pool>(m, "Pool", "Keys and values in pages of one table, as pointers and sizes; owns nothing")
      .def(py::init(&make_pool), "keys"_a, "values"_a, "key_keep"_a, "value_keep"_a, "dropped"_a, "refused"_a,
           "error"_a);
  auto c = m.def_submodule("cpu", "The CPU backend: host pointers, sizes, the number of threads");
  c.def(
      "isa", [] { return cpu::kernels().name; },
      "Instruction set of the kernels: \"avx512\", \"avx2\" or \"scalar\"; CUTE_KERNELS_CPU_ISA picks a lower one");
  c.def("select", &select, Unlocked(), "x"_a, "strides"_a, "batch"_a, "kv_heads"_a, "tokens"_a, "head_dim"_a, "dtype"_a,
        "keep"_a, "masks"_a, "counts"_a, "pruned"_a, "threads"_a);
  c.def(
      "select_two_of_four", &select_two_of_four, Unlocked(), "x"_a, "strides"_a, "batch"_a, "kv_heads"_a, "tokens"_a,
      "head_dim"_a, "dtype"_a, "role"_a, "channel_order"_a, "keep"_a, "masks"_a, "threads"_a,
      "Masks of the two largest of every four neighbours; returns how many nonzeros they leave out. keep: of these the "
      "largest of a token; 0: all");
  c.def("channel_scales", &channel_scales, Unlocked(), "x"_a, "strides"_a, "batch"_a, "kv_heads"_a, "tokens"_a,
        "head_dim"_a, "dtype"_a, "scales"_a, "threads"_a, "bf16 of a narrow codec, by channel, from the first tokens");
  c.def("token_scales", &token_scales, Unlocked(), "x"_a, "strides"_a, "batch"_a, "kv_heads"_a, "tokens"_a,
        "head_dim"_a, "dtype"_a, "masks"_a, "codec"_a, "channel_scales"_a, "scales"_a, "threads"_a,
        "bf16 by token; returns how many of the kept values the codec cannot store");
  c.def("balance", &balance, Unlocked(), "masks"_a, "channel_order"_a, "masks2"_a, "channel_order2"_a, "batch"_a,
        "kv_heads"_a, "tokens"_a, "head_dim"_a, "token_order"_a, "longest"_a, "longest2"_a, "threads"_a);
  c.def("order_slots", &order_slots, Unlocked(), "key_masks"_a, "key_codec"_a, "key_channels"_a, "key_longest"_a,
        "value_masks"_a, "value_codec"_a, "value_channels"_a, "value_longest"_a, "heads"_a, "tokens"_a, "head_dim"_a,
        "token_order"_a, "threads"_a,
        "Token orders and longest streams in the tile format two_of_four_bitmap; returns how many values either cache "
        "stores");
  c.def("pack", &pack, Unlocked(), "x"_a, "strides"_a, "masks"_a, "token_scales"_a, "view"_a, "threads"_a);
  c.def("pack_slots", &pack_slots, Unlocked(), "x"_a, "strides"_a, "masks"_a, "token_scales"_a, "view"_a, "tile_rows"_a,
        "dropped"_a, "threads"_a, "Tiles of two_of_four_bitmap that lie anywhere, trimmed to so many rows");
  c.def("decompress", &decompress, Unlocked(), "view"_a, "out"_a, "threads"_a);
  c.def("store", &store, Unlocked(), "pool"_a, "k"_a, "k_strides"_a, "v"_a, "v_strides"_a, "batch"_a, "tokens"_a,
        "sequences"_a, "first_tiles"_a, "new_order"_a, "threads"_a);
  c.def("load", &load, Unlocked(), "pool"_a, "sequence"_a, "first_tile"_a, "tiles"_a, "keys"_a, "values"_a,
        "threads"_a);
  c.def("sparse_qk", &sparse_qk, Unlocked(), "view"_a, "q"_a, "q_strides"_a, "q_heads"_a, "q_tokens"_a, "scale"_a,
        "out"_a, "out_dtype"_a, "threads"_a);
  c.def("sparse_av", &sparse_av, Unlocked(), "view"_a, "p"_a, "p_strides"_a, "p_dtype"_a, "q_heads"_a, "q_tokens"_a,
        "out"_a, "threads"_a);
}

}  // namespace cute_kernels::bindings
