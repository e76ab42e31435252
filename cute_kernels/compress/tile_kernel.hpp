// What packing and unpacking share: one CTA a tile, a kernel for every role and padded head dim.
#pragma once

#include <type_traits>

#include "cute_kernels/common/kernel_attributes.hpp"
#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/compress/compress.hpp"

namespace cute_kernels::compress {

// Where a tile is in the storage and in the dense tensor.
struct TileLocation {
  int64_t index, first_token;
  unsigned head;
  int tokens;  // that exist
  uint32_t* block;
  int rows;

  __device__ TileLocation(format::SparseView const& view) {
    unsigned tiles_per_head = static_cast<unsigned>(view.tiles_per_head());
    unsigned tile = gridDim.x - 1 - blockIdx.x;  // the last tiles first: theirs is what caches still hold
    index = tile;
    head = tile / tiles_per_head;
    first_token = int64_t{tile % tiles_per_head} * format::kTileTokens;
    tokens = static_cast<int>(min(int64_t{format::kTileTokens}, view.tokens - first_token));
    block = const_cast<uint32_t*>(view.blocks) + int64_t{view.row_offsets[index]} * format::kLanes;
    rows = view.row_offsets[index + 1] - view.row_offsets[index];
  }
};

// Of a value that is decompressed; there is one NaN.
__device__ inline uint16_t rounded_bits(float x, DType dtype) {
  if (x != x) return dtype == DType::kBFloat16 ? 0x7fc0 : 0x7e00;
  return dtype == DType::kBFloat16 ? cutlass::bfloat16_t(x).storage : cutlass::half_t(x).storage;
}

template <class F>
void visit_shape(format::SparseView const& view, F&& f) {
  auto visit_role = [&](auto head_dim) {
    if (view.role == format::Role::kKey)
      f(std::integral_constant<format::Role, format::Role::kKey>{}, head_dim);
    else
      f(std::integral_constant<format::Role, format::Role::kValue>{}, head_dim);
  };
  format::visit_head_dim(view.padded_head_dim, visit_role);
}

// A CTA a tile.
template <class Kernel, class... Args>
void launch_tiles(Kernel kernel, int64_t tiles, int threads, size_t shared_bytes, cudaStream_t stream, char const* what,
                  Args... args) {
  allow_shared_bytes(kernel, static_cast<int>(shared_bytes));
  kernel<<<static_cast<unsigned>(tiles), threads, shared_bytes, stream>>>(args...);
  check_cuda(cudaGetLastError(), what);
}

}  // namespace cute_kernels::compress
