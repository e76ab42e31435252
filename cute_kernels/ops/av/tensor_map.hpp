// Makes the tensor map of p. Host code.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "cute_kernels/common/error.hpp"
#include "cute_kernels/ops/av/sm90_params.hpp"

namespace cute_kernels::av::sm90 {

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

// The stride between rows of p if it is the same over all KV heads, else 0.
inline int64_t row_stride(Params const& params) {
  product::DenseOperand const& p = params.dense;
  int64_t tokens = params.query_tokens.divisor, heads = int64_t{params.group} * params.sparse.kv_heads;
  if (tokens == 1) return heads == 1 ? params.sparse.tokens * 16 : p.stride_head;  // of one row: any
  return heads == 1 || p.stride_head == tokens * p.stride_token ? p.stride_token : 0;
}

// Do the rows lie as a tensor map wants them, on 16 bytes, every stride a multiple of the one before?
inline bool fits_tensor_map(Params const& params) {
  product::DenseOperand const& p = params.dense;
  int units = 16 / dtype_bytes(p.dtype);
  int64_t stride = row_stride(params);
  return reinterpret_cast<uintptr_t>(p.data) % 16 == 0 && params.sparse.tokens <= INT32_MAX && stride > 0 &&
         stride % units == 0 && (params.sparse.batch == 1 || (p.stride_batch > 0 && p.stride_batch % stride == 0));
}

// Sets has_p_map, and p_map and its box if p fits. n: query rows a pass.
inline void make_p_map(RingParams& params, int n) {
  params.has_p_map = fits_tensor_map(params);
  params.box_rows = params.schedule.rows < n ? params.schedule.rows : n;
  if (!params.has_p_map) return;
  product::DenseOperand const& p = params.dense;
  format::SparseView const& values = params.sparse;
  int bytes = dtype_bytes(p.dtype);
  cuuint64_t stride = row_stride(params) * bytes, batch_stride = values.batch == 1 ? stride : p.stride_batch * bytes;
  CUtensorMapDataType type = p.dtype == DType::kFloat32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                             : p.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  auto rows = static_cast<cuuint64_t>(values.kv_heads) * params.schedule.rows;
  cuuint64_t sizes[3] = {static_cast<cuuint64_t>(values.tokens), rows, static_cast<cuuint64_t>(values.batch)};
  cuuint64_t strides[2] = {stride, batch_stride};
  cuuint32_t box[3] = {static_cast<cuuint32_t>(product::dense_row_elements(p.dtype)),
                       static_cast<cuuint32_t>(params.box_rows), 1};
  cuuint32_t steps[3] = {1, 1, 1};
  CUresult result = tensor_map_encoder()(&params.p_map, type, 3, const_cast<void*>(p.data), sizes, strides, box, steps,
                                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                         CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled failed with " + std::to_string(static_cast<int>(result)));
}

}  // namespace cute_kernels::av::sm90
