// Which tokens a query row sees.
#pragma once

#include "cute_kernels/ops/attention/params.hpp"
#include "cute_kernels/ops/attention/traits.hpp"

namespace cute_kernels::attention {

class Mask {
 public:
  CUTE_DEVICE Mask(Params const& params, schedule::WorkTile const& work_tile)
      : params_(params), work_tile_(work_tile) {}

  // Compressed tokens below this are seen by every query row.
  CUTE_DEVICE int seen_by_all() const {
    int newest = params_.causal ? params_.query_tokens.divisor - 1 : 0;
    return work_tile_.tokens + min(0, work_tile_.window_tokens - newest);
  }

  // The KV tile from which on some row may not see all tokens.
  CUTE_DEVICE int first_masked_tile() const { return work_tile_.window_end() + seen_by_all() / format::kTileTokens; }

  // Tokens that the rows of a lane's logits see, of the compressed ones or of the window.
  template <class Traits>
  CUTE_DEVICE cute::array<int, 2 * Traits::kRowBlocks> limits(bool in_window) const {
    Tensor tCcC = logit_coordinates<Traits>();
    cute::array<int, 2 * Traits::kRowBlocks> limits;
    CUTE_UNROLL
    for (int i = 0; i < 2 * Traits::kRowBlocks; ++i)
      limits[i] = limit(get<1>(tCcC(make_coord(i % 2, 0), 0, i / 2)), in_window);
    return limits;
  }

  // Sets a warp's logits of what is not seen to -infinity. token_at(position in the tile): counted as the limits are.
  template <class Traits, class FragmentS, class Limits, class TokenAt>
  CUTE_DEVICE static void apply(FragmentS& tCrS /* ((2,2),own MMA_M,MMA_N) */, int part, Limits const& limits,
                                TokenAt&& token_at) {
    Tensor tCcC = logit_coordinates<Traits>();
    CUTE_STATIC_ASSERT_V(shape(tCcC) == shape(tCrS));
    int first_position = part * 16 * Traits::kOwnTokenBlocks;
    CUTE_UNROLL
    for (int m = 0; m < size<1>(tCrS); ++m) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        int token = token_at(first_position + get<0>(tCcC(make_coord(0, j), m, 0)));
        CUTE_UNROLL
        for (int i = 0; i < 2 * Traits::kRowBlocks; ++i)
          if (token >= limits[i]) tCrS(make_coord(i % 2, j), m, i / 2) = -INFINITY;
      }
    }
  }

 private:
  Params const& params_;
  schedule::WorkTile const& work_tile_;

  template <class Traits>
  CUTE_DEVICE static auto logit_coordinates() {  // ((2,2),own MMA_M,MMA_N) -> (token_position in the part, row)
    auto thr_mma = typename Traits::TiledMma{}.get_slice(threadIdx.x % 32);
    return thr_mma.partition_C(make_identity_tensor(Shape<Int<16 * Traits::kOwnTokenBlocks>, Int<Traits::kN>>{}));
  }

  // Tokens that a row of the block sees of the compressed ones, or of the window.
  CUTE_DEVICE int limit(int row, bool in_window) const {
    int all = work_tile_.window_tokens;
    if (params_.causal) {
      int head, query_token;
      params_.query_tokens(head, query_token, work_tile_.first_row + min(row, work_tile_.rows - 1));
      all -= params_.query_tokens.divisor - 1 - query_token;
    }
    return in_window ? all : work_tile_.tokens + min(0, all);
  }
};

}  // namespace cute_kernels::attention
