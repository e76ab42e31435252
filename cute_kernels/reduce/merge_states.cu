// One pass over the outputs; every thread merges 16 bytes of a row. Bound by memory: (states + 1) outputs.
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include <cmath>
#include <cute/config.hpp>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cute_kernels/common/device.hpp"
#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/pipeline/launch.hpp"
#include "cute_kernels/reduce/merge_states.hpp"

namespace cute_kernels::reduce {
namespace {

constexpr int kThreads = 256, kBytes = 16;
constexpr int kLoadsAtOnce = 4;  // outputs that a thread loads before it adds them

template <class Element, class Out>
__global__ void __launch_bounds__(kThreads) merge(CUTE_GRID_CONSTANT States const params, int vectors_of_row) {
  constexpr int kElements = kBytes / sizeof(Element);
  constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;
  ptx::wait_for_primary();
  int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x, row = index / vectors_of_row;
  if (row >= params.rows) return;
  int64_t vectors = params.out_stride / kElements;  // from a state to the next
  float const* lses = params.lses + row;
  auto const* outs = static_cast<uint4 const*>(params.outs) + index;

  float largest = -INFINITY;
  for (int i = 0; i < params.states; ++i) largest = fmaxf(largest, __ldg(lses + i * params.lse_stride));
  float zero = largest == -INFINITY ? 0 : largest;  // -inf - -inf is no number

  float weights = 0, sums[kElements] = {};
  CUTE_NO_UNROLL
  for (int first = 0; first < params.states; first += kLoadsAtOnce) {
    float lse[kLoadsAtOnce];
    uint4 loaded[kLoadsAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      lse[i] = first + i < params.states ? __ldg(lses) : -INFINITY;
      loaded[i] = lse[i] == -INFINITY ? make_uint4(0, 0, 0, 0) : __ldg(outs);
      lses += params.lse_stride, outs += vectors;
    }
    CUTE_UNROLL
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      float weight = exp2f((lse[i] - zero) * kLog2e);
      weights += weight;
      auto const* elements = reinterpret_cast<Element const*>(&loaded[i]);
      CUTE_UNROLL
      for (int e = 0; e < kElements; ++e) sums[e] = fmaf(weight, static_cast<float>(elements[e]), sums[e]);
    }
  }

  alignas(kBytes) Out merged[kElements];
  float scale = largest == -INFINITY && weights == 0 ? 0.f : 1 / weights;  // NaN stays
  CUTE_UNROLL
  for (int e = 0; e < kElements; ++e) merged[e] = Out(sums[e] * scale);
  using Vector = std::conditional_t<sizeof(merged) == kBytes, uint4, uint2>;
  static_cast<Vector*>(params.out)[index] = *reinterpret_cast<Vector const*>(merged);
  if (params.lse && index % vectors_of_row == 0)
    params.lse[row] = largest == -INFINITY ? largest + weights : zero + kLn2 * log2f(weights);
}

template <class Element, class Out>
void launch(States const& states, cudaStream_t stream) {
  int vectors_of_row = states.head_dim * static_cast<int>(sizeof(Element)) / kBytes;
  int64_t blocks = (states.rows * vectors_of_row + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) throw std::invalid_argument("merge_states: more rows than one launch takes");
  pipeline::launch_dependent(merge<Element, Out>, dim3(static_cast<unsigned>(blocks)), kThreads, 0,
                             current_device().programmatic_launch, stream, states, vectors_of_row);
}

}  // namespace

void merge_states(States const& states, cudaStream_t stream) {
  using cutlass::bfloat16_t, cutlass::half_t;
  bool narrows = states.dtype == DType::kFloat32 && states.out_dtype != DType::kFloat32;
  switch (states.out_dtype) {
    case DType::kFloat16:
      return narrows ? launch<float, half_t>(states, stream) : launch<half_t, half_t>(states, stream);
    case DType::kBFloat16:
      return narrows ? launch<float, bfloat16_t>(states, stream) : launch<bfloat16_t, bfloat16_t>(states, stream);
    case DType::kFloat32:
      return launch<float, float>(states, stream);
  }
  throw std::invalid_argument(std::string("merge_states does not take ") + dtype_name(states.out_dtype));
}

}  // namespace cute_kernels::reduce
