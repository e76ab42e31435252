// One pass over the outputs; a thread, or one of every group of many states, merges 16 bytes of a row. Bound by memory
// ((states + 1) outputs), with few rows by latency.
#include <cutlass/bfloat16.h>
#include <cutlass/fast_math.h>
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

constexpr int kThreads = 128, kBytes = 16;
constexpr int kAtOnce = 4;  // states that a thread loads before it adds them
constexpr int kManyStatesGroups = 4;

// A warp's lanes are kGroups times as many vectors of 16 bytes; a group has every kGroups-th state.
template <class Element, class Out, int kGroups>
__global__ void __launch_bounds__(kThreads)
    merge(CUTE_GRID_CONSTANT States const params, CUTE_GRID_CONSTANT cutlass::FastDivmodU64 const vectors_of_row) {
  constexpr int kElements = kBytes / sizeof(Element), kVectors = 32 / kGroups;  // of a warp
  constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;
  int lane = threadIdx.x % 32, group = lane / kVectors;
  uint64_t warp = uint64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32, index = warp * kVectors + lane % kVectors;
  uint64_t row, vector;
  vectors_of_row(row, vector, index);
  int states = row < static_cast<uint64_t>(params.rows) ? params.states : 0;
  int64_t vectors = params.out_stride / kElements;  // from a state to the next
  float const* lses = params.lses + row + group * params.lse_stride;
  auto const* outs = static_cast<uint4 const*>(params.outs) + index + group * vectors;
  ptx::wait_for_primary();

  float largest = -INFINITY, zero = 0, weights = 0, sums[kElements] = {};
  // Makes weights and sums relative to another maximum.
  auto rescale = [&](float to) {
    zero = to == -INFINITY ? 0 : to;
    float factor = ptx::exp2_approximate((largest - zero) * kLog2e);
    largest = to, weights *= factor;
    CUTE_UNROLL
    for (float& sum : sums) sum *= factor;
  };
  CUTE_NO_UNROLL
  for (int first = group; first < states; first += kAtOnce * kGroups) {
    float lse[kAtOnce], to = largest;
    uint4 loaded[kAtOnce];
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      bool exists = first + i * kGroups < states;
      lse[i] = exists ? __ldg(lses) : -INFINITY;
      loaded[i] = exists ? __ldg(outs) : make_uint4(0, 0, 0, 0);
      lses += kGroups * params.lse_stride, outs += kGroups * vectors;
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) to = fmaxf(to, lse[i]);
    rescale(to);
    CUTE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      float weight = ptx::exp2_approximate((lse[i] - zero) * kLog2e);
      weights += weight;
      if (lse[i] == -INFINITY) loaded[i] = make_uint4(0, 0, 0, 0);  // may be anything
      auto const* elements = reinterpret_cast<Element const*>(&loaded[i]);
      CUTE_UNROLL
      for (int e = 0; e < kElements; ++e) sums[e] = fmaf(weight, static_cast<float>(elements[e]), sums[e]);
    }
  }
  if constexpr (kGroups > 1) {
    auto all_groups = [](float x, auto&& combine) {
      CUTE_UNROLL
      for (int lanes = kVectors; lanes < 32; lanes *= 2) x = combine(x, __shfl_xor_sync(~0u, x, lanes));
      return x;
    };
    auto add = [](float a, float b) { return a + b; };
    rescale(all_groups(largest, [](float a, float b) { return fmaxf(a, b); }));
    weights = all_groups(weights, add);
    CUTE_UNROLL
    for (float& sum : sums) sum = all_groups(sum, add);
  }
  if (states == 0 || group > 0) return;

  alignas(kBytes) Out merged[kElements];
  float scale = largest == -INFINITY && weights == 0 ? 0.f : 1 / weights;  // NaN stays
  CUTE_UNROLL
  for (int e = 0; e < kElements; ++e) merged[e] = Out(sums[e] * scale);
  using Vector = std::conditional_t<sizeof(merged) == kBytes, uint4, uint2>;
  static_cast<Vector*>(params.out)[index] = *reinterpret_cast<Vector const*>(merged);
  if (params.lse && vector == 0)
    params.lse[row] = largest == -INFINITY ? largest + weights : zero + kLn2 * log2f(weights);
}

template <class Element, class Out>
void launch(States const& states, cudaStream_t stream) {
  bool many = states.states > kAtOnce;
  int block_vectors = many ? kThreads / kManyStatesGroups : kThreads;
  int vectors_of_row = states.head_dim * static_cast<int>(sizeof(Element)) / kBytes;
  int64_t blocks = (states.rows * vectors_of_row + block_vectors - 1) / block_vectors;
  if (blocks > INT32_MAX) throw std::invalid_argument("merge_states: more rows than one launch takes");
  pipeline::launch_dependent(many ? merge<Element, Out, kManyStatesGroups> : merge<Element, Out, 1>,
                             dim3(static_cast<unsigned>(blocks)), kThreads, 0, current_device().programmatic_launch,
                             stream, states, cutlass::FastDivmodU64(static_cast<uint64_t>(vectors_of_row)));
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
