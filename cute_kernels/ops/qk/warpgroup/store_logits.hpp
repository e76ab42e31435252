// Writes a tile's logits: from a warpgroup's accumulators through shared memory, where they are put back in token
// order, to rows. Layout of shared memory: logits_layout.hpp.
#pragma once

#include <cutlass/arch/memory.h>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include "cute_kernels/common/pack_halves.hpp"
#include "cute_kernels/mma/warpgroup/traits.hpp"
#include "cute_kernels/ops/qk/params.hpp"
#include "cute_kernels/ops/qk/warpgroup/logits_layout.hpp"

namespace cute_kernels::qk {

using namespace cute;

// A warpgroup's shared memory: q as WGMMA's B operand, and logits on their way out (see LogitsWriter).
template <class Traits>
struct WarpgroupStorage {
  alignas(1024) typename Traits::Element b[cosize_v<typename Traits::SmemLayoutB>];
  uint128_t logits[2][kLogitsUnits<Traits::kN>];
};

// Of a work tile, tile after tile. Each is first `stage`d in shared memory by all warps, then, when all have, `store`d
// to rows by all.
//
// Logits of 16 bits: tiles alternate between the two buffers. One barrier of the warps between staging a tile and
// storing it is enough, for it also lies between storing the tile before and staging the tile after.
// kWide, 32 bits: upper halves are in one buffer, lower ones in the other, and there is a barrier between storing a
// tile and staging the next as well.
template <class Traits, bool kWide>
class LogitsWriter {
 public:
  // tile: the first that is staged.
  CUTE_DEVICE LogitsWriter(Params const& params, schedule::WorkTile const& work_tile, int tile,
                           WarpgroupStorage<Traits>& storage, int warp)
      : params_(params), storage_(storage), tiles_left_(work_tile.tiles.end - tile) {
    int lane = threadIdx.x % 32, row = warp * kWarpUnits * kUnitRows + (vector_stores() ? lane / 4 : 0);
    first_unit_ = warp * kWarpUnits;
    rows_left_ = work_tile.rows - row;
    lane_token_ = vector_stores() ? lane % 4 * kVector : lane;
    int64_t out_row = params.head(work_tile) * params.schedule.rows + work_tile.first_row + row;
    int64_t token = int64_t{tile - work_tile.tiles.begin} * format::kTileTokens + lane_token_;
    out_ = static_cast<Out*>(params.out) + out_row * params.sparse.tokens + token;
  }

  // token: of the lane's position, position_of_lane.
  template <class FragmentC>
  CUTE_DEVICE void stage(int buffer, int token, FragmentC const& tCrC /* ((2,2,N/8),1,1) */) {
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
      auto stage_as = [&](auto type) {
        using T = decltype(type);
        auto pair = [&](int i) { return to_pair<T>(tCrC(i) * scale, tCrC(i + 1) * scale); };
        uint128_t* to = storage_.logits[buffer];
        CUTE_UNROLL
        for (int unit = 0; unit < kUnits; unit += 2)
          SM90_U32x4_STSM_N::copy(pair(4 * unit), pair(4 * unit + 2), pair(4 * unit + 4), pair(4 * unit + 6),
                                  to[logits_unit<Traits::kN>(token, upper_lanes()) ^ unit]);
      };
      if (params_.out_dtype == DType::kBFloat16)
        stage_as(bfloat16_t{});
      else
        stage_as(half_t{});
    }
  }

  // The position whose token a lane passes to `stage`.
  CUTE_DEVICE static int position_of_lane(int warp) { return 16 * warp + threadIdx.x % 16; }

  CUTE_DEVICE void store(int buffer) {
    int64_t before = int64_t{params_.schedule.tiles_per_work_tile.divisor - 1} * format::kTileTokens;
    int tokens = --tiles_left_ > 0 ? format::kTileTokens : static_cast<int>(params_.sparse.tokens - before);
    if (vector_stores())
      store_vectors(buffer, tokens);
    else
      store_elements(buffer, tokens);
    out_ += format::kTileTokens;
  }

 private:
  using Out = std::conditional_t<kWide, uint32_t, uint16_t>;  // bits of an output
  static constexpr int kUnits = Traits::kN / kUnitRows;
  static constexpr int kVector = 16 / sizeof(Out);
  static constexpr int kWarpUnits = kUnits / mma::kWarpgroupWarps;  // that a warp stores

  Params const& params_;
  WarpgroupStorage<Traits>& storage_;
  int tiles_left_;  // to be stored until the work tile ends
  int first_unit_;  // of the warp's
  int rows_left_;   // from the lane's first row on
  int lane_token_;  // the lane's first token in a tile
  Out* out_;        // of the lane, in the next tile

  // Looked up rather than held on to: registers are short.
  CUTE_DEVICE bool vector_stores() const {
    if constexpr (kWide) return params_.vector_stores;
    return params_.sparse.tokens % kVector == 0 && reinterpret_cast<uintptr_t>(params_.out) % 16 == 0;
  }

  // Halves of two registers, those of x below.
  CUTE_DEVICE static uint32_t upper_halves(uint32_t x, uint32_t y) { return ptx::permute_bytes(x, y, 0x7632); }
  CUTE_DEVICE static uint32_t lower_halves(uint32_t x, uint32_t y) { return ptx::permute_bytes(x, y, 0x5410); }

  // stmatrix: lanes 0 to 15 say where the first two registers' positions go, the others where the last two's do.
  CUTE_DEVICE static int upper_lanes() { return threadIdx.x / 16 % 2; }

  // 16 bytes a lane and store: 64 bytes of each of 8 rows.
  CUTE_DEVICE void store_vectors(int buffer, int tokens) const {
    int lane = threadIdx.x % 32, token = token_of_matrix_row<kVector>(lane / kMatrixTokens, lane % kMatrixTokens);
    int from = logits_unit<Traits::kN>(token, first_unit_);
    Out* out = out_;
    CUTE_UNROLL
    for (int i = 0; i < kWarpUnits; ++i, out += kUnitRows * params_.sparse.tokens) {
      CUTE_UNROLL
      for (int first = 0; first < format::kTileTokens; first += kReadTokens) {
        int unit = (from ^ i) + logits_unit<Traits::kN>(first, 0);
        auto read = [&](int from_buffer, uint32_t* pairs) {
          SM75_U16x8_LDSM_T::copy(storage_.logits[from_buffer][unit], pairs[0], pairs[1], pairs[2], pairs[3]);
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
          read(buffer, words);
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
  CUTE_DEVICE void store_elements(int buffer, int tokens) const {
    Out* out = out_;
    CUTE_NO_UNROLL
    for (int i = 0; i < kWarpUnits; ++i, out += kUnitRows * params_.sparse.tokens) {
      CUTE_NO_UNROLL
      for (int first = 0; first < format::kTileTokens; first += kReadTokens) {
        if (lane_token_ + first >= tokens) continue;
        int unit = logits_unit<Traits::kN>(lane_token_ + first, first_unit_) ^ i;
        auto read = [&](int from_buffer) { return reinterpret_cast<uint4 const&>(storage_.logits[from_buffer][unit]); };
        uint4 lower = read(kWide ? 1 : buffer), upper = kWide ? read(0) : lower;
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

}  // namespace cute_kernels::qk
