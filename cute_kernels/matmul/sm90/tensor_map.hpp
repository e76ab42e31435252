// Makes the tensor map of p. Host code.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>

#include "cute_kernels/common/error.hpp"
#include "cute_kernels/matmul/launch.hpp"
#include "cute_kernels/matmul/sm90/params.hpp"
#include "cute_kernels/matmul/stage.hpp"

namespace cute_kernels::matmul::sm90 {

// The driver's function, found at run time: the library links to no driver.
inline auto tensor_map_encoder() {
  static auto const encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encode;
}

// The distance between rows of p, all KV heads' in a line, if there is one; 0 if there is not.
inline int64_t row_stride(Params const& params) {
  DenseOperand const& p = params.dense;
  int64_t tokens = params.work.query_tokens.divisor, heads = int64_t{params.work.group} * params.sparse.kv_heads;
  if (tokens == 1) return heads == 1 ? params.sparse.tokens * 16 : p.stride_head;  // of one row: any
  return heads == 1 || p.stride_head == tokens * p.stride_token ? p.stride_token : 0;
}

// Do the rows lie as a tensor map wants them, on 16 bytes, every stride a multiple of the one before?
inline bool fits_tensor_map(Params const& params) {
  DenseOperand const& p = params.dense;
  int units = 16 / dtype_bytes(p.dtype);
  int64_t stride = row_stride(params);
  return reinterpret_cast<uintptr_t>(p.data) % 16 == 0 && params.sparse.tokens <= INT32_MAX && stride > 0 &&
         stride % units == 0 && (params.sparse.batch == 1 || (p.stride_batch > 0 && p.stride_batch % stride == 0));
}

inline TmaParams with_tensor_map(Params const& from, Config const& config) {
  TmaParams params{};
  static_cast<Params&>(params) = from;
  params.ring = ring_shape(from.stages, config);
  params.first_tiles = first_tiles(from.sparse, config);
  params.cluster = cluster_shape(config, from.work.rows);
  if (from.sparse.role == format::Role::kKey) return params;
  params.vectorized = fits_tensor_map(from);
  params.box_rows = from.work.rows < config.n ? from.work.rows : config.n;
  if (!params.vectorized) return params;
  DenseOperand const& p = from.dense;
  int bytes = dtype_bytes(p.dtype);
  cuuint64_t stride = row_stride(from) * bytes, batch_stride = from.sparse.batch == 1 ? stride : p.stride_batch * bytes;
  CUtensorMapDataType type = p.dtype == format::DType::kFloat32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                             : p.dtype == format::DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                  : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  auto rows = static_cast<cuuint64_t>(from.sparse.kv_heads) * from.work.rows;
  cuuint64_t sizes[3] = {static_cast<cuuint64_t>(from.sparse.tokens), rows, static_cast<cuuint64_t>(from.sparse.batch)};
  cuuint64_t strides[2] = {stride, batch_stride};
  cuuint32_t box[3] = {static_cast<cuuint32_t>(dense_row_elements(p.dtype)), static_cast<cuuint32_t>(params.box_rows),
                       1};
  cuuint32_t steps[3] = {1, 1, 1};
  CUresult result = tensor_map_encoder()(&params.dense_map, type, 3, const_cast<void*>(p.data), sizes, strides, box,
                                         steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                         CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled failed with " + std::to_string(static_cast<int>(result)));
  return params;
}

}  // namespace cute_kernels::matmul::sm90
