// Number types of dense tensors.
#pragma once

namespace cute_kernels {

enum class DType : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

constexpr char const* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
  }
  return "unknown";
}

}  // namespace cute_kernels
