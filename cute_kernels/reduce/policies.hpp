// How partials are put together: by a sum (sparse_av), or by a log-sum-exp (attention).
//
// A policy has
//   Partial<Shape>      what a worker stores of a work tile: `vectors`, and what it knows of every query row
//   kSumsInCta          whether a CTA may add partials up before it stores them (cta_sum.hpp)
//   Accumulator<Shape>  one vector and its rows, put together partial by partial; a default one is neutral
#pragma once

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/reduce/partial.hpp"

namespace cute_kernels::reduce {

CUTE_DEVICE float4 shuffle_xor(float4 x, int mask) {
  return make_float4(__shfl_xor_sync(~0u, x.x, mask), __shfl_xor_sync(~0u, x.y, mask), __shfl_xor_sync(~0u, x.z, mask),
                     __shfl_xor_sync(~0u, x.w, mask));
}

struct Sum {
  static constexpr bool kHasLse = false, kSumsInCta = true;

  template <class OutputShape>
  struct Partial {
    float4 vectors[OutputShape::kVectors];
  };

  template <class OutputShape>
  struct Accumulator {
    float4 vector = make_float4(0, 0, 0, 0);

    CUTE_DEVICE Accumulator() {}
    // index: of VectorLayout
    CUTE_DEVICE Accumulator(Partial<OutputShape> const& partial, int index) : vector(partial.vectors[index]) {}

    CUTE_DEVICE void add(float4 other) {
      vector.x += other.x, vector.y += other.y, vector.z += other.z, vector.w += other.w;
    }
    CUTE_DEVICE void add(Accumulator const& other) { add(other.vector); }
    // What the lane has whose index differs by `mask`, which takes part in the same way.
    CUTE_DEVICE void add_from_lane(int mask) { add(shuffle_xor(vector, mask)); }
    // One of the four results.
    CUTE_DEVICE float value(int v) const {
      return v % 2 == 0 ? (v < 2 ? vector.x : vector.z) : (v < 2 ? vector.y : vector.w);
    }
  };
};

// -inf - -inf is no number: where a row has seen nothing, its exponentials are taken relative to 0.
CUTE_DEVICE float finite_max(float row_max) { return row_max == -INFINITY ? 0.f : row_max; }

struct LogSumExp {
  static constexpr bool kHasLse = true, kSumsInCta = false;

  template <class OutputShape>
  struct Partial {
    float4 vectors[OutputShape::kVectors];
    float2 rows[OutputShape::kRows];  // row_max, to which exponentials are relative, and row_sum, their sum; base 2
  };

  template <class OutputShape>
  struct Accumulator {
    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0, 0};  // of the lane's two rows
    float4 vector = make_float4(0, 0, 0, 0);

    CUTE_DEVICE Accumulator() {}
    CUTE_DEVICE Accumulator(Partial<OutputShape> const& partial, int index) : vector(partial.vectors[index]) {
      auto rows = *reinterpret_cast<float4 const*>(partial.rows + first_row(index));
      row_max[0] = rows.x, row_sum[0] = rows.y, row_max[1] = rows.z, row_sum[1] = rows.w;
    }

    CUTE_DEVICE void add(float const (&other_max)[2], float const (&other_sum)[2], float4 other) {
      float mine[2], theirs[2];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float larger = fmaxf(row_max[i], other_max[i]);
        mine[i] = ptx::exp2_approximate(row_max[i] - finite_max(larger));
        theirs[i] = ptx::exp2_approximate(other_max[i] - finite_max(larger));
        row_max[i] = larger;
        row_sum[i] = mine[i] * row_sum[i] + theirs[i] * other_sum[i];
      }
      float4& a = vector;
      a.x = mine[0] * a.x + theirs[0] * other.x, a.y = mine[1] * a.y + theirs[1] * other.y;
      a.z = mine[0] * a.z + theirs[0] * other.z, a.w = mine[1] * a.w + theirs[1] * other.w;
    }
    CUTE_DEVICE void add(Accumulator const& other) { add(other.row_max, other.row_sum, other.vector); }
    CUTE_DEVICE void add_from_lane(int mask) {
      auto from = [&](float x) { return __shfl_xor_sync(~0u, x, mask); };
      add({from(row_max[0]), from(row_max[1])}, {from(row_sum[0]), from(row_sum[1])}, shuffle_xor(vector, mask));
    }

    // One of the four results; of one of the two rows the natural logarithm of its sum of exponentials.
    CUTE_DEVICE float value(int v) const {
      float accumulated = v % 2 == 0 ? (v < 2 ? vector.x : vector.z) : (v < 2 ? vector.y : vector.w);
      // NaN stays, also in a row of NaN.
      return accumulated * (max_of(v % 2) == -INFINITY ? 0.f : ptx::reciprocal_approximate(sum_of(v % 2)));
    }
    CUTE_DEVICE float lse(int row) const {
      constexpr float kLn2 = 0.693147180559945f;
      return kLn2 * (max_of(row) + log2f(sum_of(row)));
    }

   private:
    CUTE_DEVICE static int first_row(int index) {
      return index / 32 / OutputShape::kChannelBlocks * 8 + 2 * (index % 4);
    }
    CUTE_DEVICE float max_of(int row) const { return row == 0 ? row_max[0] : row_max[1]; }
    CUTE_DEVICE float sum_of(int row) const { return row == 0 ? row_sum[0] : row_sum[1]; }
  };
};

}  // namespace cute_kernels::reduce
