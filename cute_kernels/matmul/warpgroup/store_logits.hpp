// Writes a tile's logits: from a warpgroup's accumulators through shared memory, where they are put back in token
// order, to rows. Layout of shared memory: logits_layout.hpp.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cutlass/arch/memory.h>
#include <cutlass/numeric_conversion.h>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/matmul/warpgroup/worker.hpp"

namespace cute_kernels::matmul::warpgroup {

// Of a segment, tile after tile. Each is first `put` by all warps, then, when all have, `store`d by all.
//
// Logits of 16 bits: tiles take turns at the two buffers. One meeting of the warps between a tile's put and its store
// is enough, for it also lies between the store of the tile before and the put of the tile after.
// kWide, 32 bits: upper halves are in one buffer, lower ones in the other, and warps meet between a store and the next
// put as well.
template <class Traits, bool kWide>
class LogitsWriter {
 public:
  // tile: the first that is put.
  CUTE_DEVICE LogitsWriter(Params const& params, Segment const& segment, int tile, KeyStorage<Traits>& storage,
                           int warp)
      : params_(params),
        storage_(storage),
        vectorized_(params.sparse.tokens % kVector == 0 && reinterpret_cast<uintptr_t>(params.out) % 16 == 0),
        tiles_left_(segment.tiles.end - tile) {
    int lane = threadIdx.x % 32, row = warp * kWarpUnits * kUnitRows + (vectorized_ ? lane / 4 : 0);
    first_unit_ = warp * kWarpUnits;
    rows_left_ = segment.rows - row;
    lane_token_ = vectorized_ ? lane % 4 * kVector : lane;
    int64_t out_row = int64_t{segment.head} * params.work.rows + segment.first_row + row;
    int64_t token = int64_t{tile - segment.tiles.begin} * format::kTileTokens + lane_token_;
    out_ = static_cast<Out*>(params.out) + out_row * params.sparse.tokens + token;
  }

  // token: of the lane's position, position_of_lane.
  template <class FragmentC>
  CUTE_DEVICE void put(int turn, int token, FragmentC const& tCrC /* ((2,2,N/8),1,1) */) {
    CUTE_STATIC_ASSERT_V(size(tCrC) == Int<4 * kUnits>{});
    float scale = params_.scale;
    if constexpr (kWide) {
      uint128_t* to = storage_.logits[upper_lanes()];
      CUTE_UNROLL
      for (int unit = 0; unit < kUnits; ++unit) {
        uint32_t bits[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(tCrC(4 * unit + i) * scale);
        SM90_U32x4_STSM_N::copy(upper_halves(bits[0], bits[1]), upper_halves(bits[2], bits[3]),
                                lower_halves(bits[0], bits[1]), lower_halves(bits[2], bits[3]),
                                to[logits_unit<Traits::kN>(token, 0) ^ unit]);
      }
    } else {
      auto put_as = [&](auto type) {
        using T = decltype(type);
        auto pair = [&](int i) {
          cutlass::Array<float, 2> scaled;
          scaled[0] = tCrC(i) * scale, scaled[1] = tCrC(i + 1) * scale;
          cutlass::Array<T, 2> converted = cutlass::NumericArrayConverter<T, float, 2>{}(scaled);
          return reinterpret_cast<uint32_t const&>(converted);
        };
        uint128_t* to = storage_.logits[turn];
        CUTE_UNROLL
        for (int unit = 0; unit < kUnits; unit += 2)
          SM90_U32x4_STSM_N::copy(pair(4 * unit), pair(4 * unit + 2), pair(4 * unit + 4), pair(4 * unit + 6),
                                  to[logits_unit<Traits::kN>(token, upper_lanes()) ^ unit]);
      };
      if (params_.out_dtype == DType::kBFloat16)
        put_as(bfloat16_t{});
      else
        put_as(half_t{});
    }
  }

  // Whose token a lane is to bring along.
  CUTE_DEVICE static int position_of_lane(int warp) { return 16 * warp + threadIdx.x % 16; }

  CUTE_DEVICE void store(int turn) {
    int64_t before = int64_t{params_.work.tiles_per_segment.divisor - 1} * format::kTileTokens;
    int tokens = --tiles_left_ > 0 ? format::kTileTokens : static_cast<int>(params_.sparse.tokens - before);
    if (vectorized_)
      store_vectors(turn, tokens);
    else
      store_elements(turn, tokens);
    out_ += format::kTileTokens;
  }

 private:
  using Out = std::conditional_t<kWide, uint32_t, uint16_t>;  // bits of an output
  static constexpr int kUnits = Traits::kN / kUnitRows;
  static constexpr int kVector = 16 / sizeof(Out);
  static constexpr int kWarpUnits = kUnits / kWarpgroupWarps;  // that a warp stores

  Params const& params_;
  KeyStorage<Traits>& storage_;
  bool vectorized_;
  int tiles_left_;  // to be stored until the segment ends
  int first_unit_;  // of the warp's
  int rows_left_;   // from the lane's first row on
  int lane_token_;  // the lane's first token in a tile
  Out* out_;        // of the lane, in the next tile

  // Halves of two registers, those of x below.
  CUTE_DEVICE static uint32_t upper_halves(uint32_t x, uint32_t y) { return ptx::permute_bytes(x, y, 0x7632); }
  CUTE_DEVICE static uint32_t lower_halves(uint32_t x, uint32_t y) { return ptx::permute_bytes(x, y, 0x5410); }

  // stmatrix: lanes 0 to 15 say where the first two registers' positions go, the others where the last two's do.
  CUTE_DEVICE static int upper_lanes() { return threadIdx.x / 16 % 2; }

  // 16 bytes a lane and store: 64 bytes of each of 8 rows.
  CUTE_DEVICE void store_vectors(int turn, int tokens) const {
    int lane = threadIdx.x % 32, token = token_of_matrix_row<kVector>(lane / kMatrixTokens, lane % kMatrixTokens);
    int from = logits_unit<Traits::kN>(token, first_unit_);
    Out* out = out_;
    CUTE_UNROLL
    for (int i = 0; i < kWarpUnits; ++i, out += kUnitRows * params_.sparse.tokens) {
      CUTE_UNROLL
      for (int first = 0; first < format::kTileTokens; first += kReadTokens) {
        int unit = (from ^ i) + logits_unit<Traits::kN>(first, 0);
        auto read = [&](int buffer, uint32_t* pairs) {
          SM75_U16x8_LDSM_T::copy(storage_.logits[buffer][unit], pairs[0], pairs[1], pairs[2], pairs[3]);
        };
        uint32_t words[sizeof(Out) / 2 * 4];
        if constexpr (kWide) {
          uint32_t upper[4], lower[4];
          read(0, upper), read(1, lower);
          CUTE_UNROLL
          for (int j = 0; j < 4; ++j) {
            words[2 * j] = lower_halves(lower[j], upper[j]);
            words[2 * j + 1] = upper_halves(lower[j], upper[j]);
          }
        } else {
          read(turn, words);
        }
        CUTE_UNROLL
        for (int v = 0; v < kReadTokens / 4 / kVector; ++v) {
          int offset = first + 4 * kVector * v;
          uint4 vector = make_uint4(words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]);
          cutlass::arch::global_store<uint4, 16>(vector, out + offset,
                                                 i * kUnitRows < rows_left_ && lane_token_ + offset < tokens);
        }
      }
    }
  }

  // Rows that start anywhere: a token a lane.
  CUTE_DEVICE void store_elements(int turn, int tokens) const {
    Out* out = out_;
    CUTE_NO_UNROLL
    for (int i = 0; i < kWarpUnits; ++i, out += kUnitRows * params_.sparse.tokens) {
      CUTE_NO_UNROLL
      for (int first = 0; first < format::kTileTokens; first += kReadTokens) {
        if (lane_token_ + first >= tokens) continue;
        int unit = logits_unit<Traits::kN>(lane_token_ + first, first_unit_) ^ i;
        auto read = [&](int buffer) { return reinterpret_cast<uint4 const&>(storage_.logits[buffer][unit]); };
        uint4 lower = read(kWide ? 1 : turn), upper = kWide ? read(0) : lower;
        uint32_t const l[4] = {lower.x, lower.y, lower.z, lower.w}, u[4] = {upper.x, upper.y, upper.z, upper.w};
        Out* to = out + first;
        CUTE_UNROLL
        for (int j = 0; j < kUnitRows; ++j, to += params_.sparse.tokens) {
          if (i * kUnitRows + j >= rows_left_) break;
          if constexpr (kWide)
            *to = j % 2 ? upper_halves(l[j / 2], u[j / 2]) : lower_halves(l[j / 2], u[j / 2]);
          else
            *to = static_cast<Out>(j % 2 ? l[j / 2] >> 16 : l[j / 2]);
        }
      }
    }
  }
};

}  // namespace cute_kernels::matmul::warpgroup
