// The launchers of the prefill kernel that dispatch/ chooses from.
#pragma once

#include <cuda_runtime_api.h>

#include <array>

#include "cute_kernels/ops/attention/prefill/params.hpp"

namespace cute_kernels::attention::prefill {

inline constexpr int kConsumerRows = 64;  // query rows of a consumer warpgroup: the M of WGMMA

// Which of the kernel's variants: see kVariants.
struct Variant {
  int consumers;     // warpgroups of a CTA
  int cluster_ctas;  // that share decoded tiles

  constexpr int cta_rows() const { return consumers * kConsumerRows; }
  constexpr int rows() const { return cluster_ctas * cta_rows(); }
};

struct Limits {
  int decoders;            // warpgroups of a CTA that decode, each with stages of its own
  int max_block_stages;    // of a decoder
  int fixed_shared_bytes;  // without these stages
};

// Codecs: those that share a launcher (mma/stored_operand.hpp).
template <int kHeadDim, class Codecs>
struct Launcher {
  // In ascending order of rows.
  static constexpr auto kVariants = [] {
    if constexpr (kHeadDim < 256)
      return std::array{Variant{1, 1}, Variant{2, 1}, Variant{2, 2}};
    else
      return std::array{Variant{1, 1}, Variant{2, 1}};
  }();

  static Limits limits(format::SparseView const& keys, Variant variant);
  // In clusters of all splits of a work tile if params.merges, else as the variant says.
  static void launch(Params const& params, Variant variant, int ctas, int shared_bytes, cudaStream_t stream);
};

}  // namespace cute_kernels::attention::prefill
