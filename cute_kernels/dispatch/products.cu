#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/dispatch/device.hpp"
#include "cute_kernels/dispatch/products.hpp"
#include "cute_kernels/matmul/combine.hpp"
#include "cute_kernels/matmul/stage.hpp"

namespace cute_kernels::dispatch {
namespace {

using format::Role;

struct Kernels {
  int max_rows;    // query rows a pass takes at most
  int max_shares;  // that a CTA leaves of a segment for the combine of sparse_av
  matmul::KernelLimits (*limits)(format::DType, int);
  void (*launch)(matmul::Params const&, matmul::Config const&, cudaStream_t);

  // The smallest instantiated N that holds all rows, or the largest.
  int rows_a_pass(int rows) const {
    int n = 8;
    while (n < rows && n < max_rows) n *= 2;
    return n;
  }
};

struct Sm80 {
  template <Role kRole, int kHeadDim>
  static Kernels kernels() {
    return {16, 1, matmul::sm80::limits<kRole, kHeadDim>, matmul::sm80::launch<kRole, kHeadDim>};
  }
};

struct Sm90 {
  template <Role kRole, int kHeadDim>
  static Kernels kernels() {
    return {64, 4, matmul::sm90::limits<kRole, kHeadDim>, matmul::sm90::launch<kRole, kHeadDim>};
  }
};

template <class Arch, Role kRole>
Kernels kernels_for_head_dim(int padded_head_dim) {
  switch (padded_head_dim) {
    case 64:
      return Arch::template kernels<kRole, 64>();
    case 128:
      return Arch::template kernels<kRole, 128>();
    case 256:
      return Arch::template kernels<kRole, 256>();
    default:
      throw std::runtime_error("head_dim " + std::to_string(padded_head_dim) + " is not instantiated");
  }
}

template <class Arch>
Kernels kernels_for_view(format::SparseView const& view) {
  return view.role == Role::kKey ? kernels_for_head_dim<Arch, Role::kKey>(view.padded_head_dim)
                                 : kernels_for_head_dim<Arch, Role::kValue>(view.padded_head_dim);
}

Kernels find_kernels(std::string const& backend, format::SparseView const& view, DeviceLimits const& device) {
  require_backend(backend, device);
#if CUTE_KERNELS_HAVE_SM90A
  if (backend == "sm90") return kernels_for_view<Sm90>(view);
#endif
#if CUTE_KERNELS_HAVE_SM80
  return kernels_for_view<Sm80>(view);
#endif
}

bool is_aligned(void const* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// May the kernel move 16 bytes of p, or four logits, at a time?
bool vectorizes(Product const& p) {
  if (p.sparse.role == Role::kKey) return p.sparse.tokens % 4 == 0 && is_aligned(p.out, 4 * dtype_bytes(p.out_dtype));
  int elements = 16 / dtype_bytes(p.dense.dtype);
  return is_aligned(p.dense.data, 16) && p.dense.stride_batch % elements == 0 && p.dense.stride_head % elements == 0 &&
         p.dense.stride_token % elements == 0;
}

}  // namespace

void run(Product const& product, Workspace const& workspace, std::string const& backend, cudaStream_t stream) {
  format::SparseView const& view = product.sparse;
  bool is_key = view.role == Role::kKey;
  DeviceLimits device = current_device();
  Kernels kernels = find_kernels(backend, view, device);

  matmul::Params params{};
  params.sparse = view;
  params.dense = product.dense;
  params.out = product.out;
  params.out_dtype = is_key ? product.out_dtype : view.dtype;
  params.scale = product.scale;
  params.vectorized = vectorizes(product);

  int group = product.query_heads / view.kv_heads, rows = group * product.query_tokens, n = kernels.rows_a_pass(rows);
  int row_blocks = (rows + n - 1) / n;
  int64_t tiles = view.tiles() * row_blocks;
  if (tiles > INT32_MAX / 2) throw std::runtime_error("the product has more than 2^30 tiles; split the batch");

  matmul::KernelLimits limits = kernels.limits(view.dtype, n);
  Plan plan = choose_plan(device, limits, n, rows, view.max_tile_rows, matmul::kOrderBytes,
                          is_key ? 0 : matmul::dense_row_bytes(product.dense.dtype), tiles, tuning);
  int all = static_cast<int>(tiles), tiles_per_segment = static_cast<int>(view.tiles_per_head());
  if (limits.joins_segments) cut_by_segments(device, all / tiles_per_segment, tiles_per_segment, plan.config);
  bool by_segments = plan.config.segment_pieces > 0;
  int pieces = by_segments ? plan.config.segment_pieces : plan.config.ctas * plan.config.workers;
  int part_tiles = by_segments ? tiles_per_segment : all;
  params.work = {all,
                 rows,
                 group,
                 part_tiles,
                 part_tiles / pieces,
                 part_tiles % pieces,
                 cutlass::FastDivmod(pieces),
                 cutlass::FastDivmod(tiles_per_segment),
                 cutlass::FastDivmod(row_blocks),
                 cutlass::FastDivmod(product.query_tokens),
                 cutlass::FastDivmod(view.kv_heads),
                 by_segments};
  params.stages = plan.stages;
  if (!is_key && !by_segments) {
    int64_t partials = matmul::max_partials(plan.config.ctas * kernels.max_shares, view.heads() * row_blocks);
    params.partials = workspace(matmul::partial_bytes(partials, n, view.padded_head_dim));
  }
  kernels.launch(params, plan.config, stream);
}

}  // namespace cute_kernels::dispatch
