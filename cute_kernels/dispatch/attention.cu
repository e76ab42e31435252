#include "cute_kernels/attention/combine.hpp"
#include "cute_kernels/attention/launch.hpp"
#include "cute_kernels/attention/stage.hpp"
#include "cute_kernels/dispatch/attention.hpp"
#include "cute_kernels/dispatch/device.hpp"

namespace cute_kernels::dispatch {
namespace {

using attention::Params;

struct AttentionKernels {
  matmul::KernelLimits (*limits)(format::DType, int);
  void (*launch)(Params const&, matmul::Config const&, cudaStream_t);
};

template <int kHeadDim>
AttentionKernels kernels_for(std::string const& backend) {
#if CUTE_KERNELS_HAVE_SM90A
  if (backend == "sm90") return {attention::sm90::limits<kHeadDim>, attention::sm90::launch<kHeadDim>};
#endif
#if CUTE_KERNELS_HAVE_SM80
  return {attention::sm80::limits<kHeadDim>, attention::sm80::launch<kHeadDim>};
#endif
}

AttentionKernels find_kernels(std::string const& backend, int padded_head_dim, DeviceLimits const& device) {
  require_backend(backend, device);
  switch (padded_head_dim) {
    case 64:
      return kernels_for<64>(backend);
    case 128:
      return kernels_for<128>(backend);
    case 256:
      return kernels_for<256>(backend);
    default:
      throw std::runtime_error("head_dim " + std::to_string(padded_head_dim) + " is not instantiated");
  }
}

// How query rows are cut: into blocks of n.
struct Rows {
  int group, rows, n, blocks;

  Rows(format::SparseView const& keys, int q_heads, int q_tokens) : group(q_heads / keys.kv_heads) {
    rows = group * q_tokens;
    for (n = 8; n < rows && n < attention::max_rows(keys.padded_head_dim);) n *= 2;
    blocks = (rows + n - 1) / n;
  }
};

struct WindowAccess {
  bool vectorized, staged;
};

// How a window may be read: see Params.
WindowAccess window_access(attention::Problem const& problem) {
  auto in_vectors = [](void const* data, int64_t const* strides) {
    constexpr int kVector = 8;
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides[0] % kVector == 0 && strides[1] % kVector == 0 &&
           strides[2] % kVector == 0;
  };
  attention::Window const& window = problem.window;
  int head_dim = problem.keys.head_dim;
  bool vectorized =
      head_dim % 8 == 0 && in_vectors(window.keys, window.key_strides) && in_vectors(problem.q, problem.q_strides);
  bool contiguous = window.key_strides[2] == head_dim && window.value_strides[2] == head_dim;
  return {vectorized, vectorized && contiguous && in_vectors(window.values, window.value_strides)};
}

void check_sizes(attention::Problem const& problem, int64_t places) {
  if (places > INT32_MAX / 2) throw std::runtime_error("the call has more than 2^30 tiles of work; split the batch");
  auto reach = [&](int64_t const* strides) { return int64_t{problem.window.tokens} * strides[2]; };
  if (reach(problem.window.key_strides) > INT32_MAX || reach(problem.window.value_strides) > INT32_MAX)
    throw std::runtime_error("the tokens of a window lie 2^31 elements apart or more; pass a contiguous one");
}

}  // namespace

void run(attention::Problem const& problem, Workspace const& workspace, std::string const& backend,
         cudaStream_t stream) {
  format::SparseView const &keys = problem.keys, &values = problem.values;
  DeviceLimits device = current_device();
  AttentionKernels kernels = find_kernels(backend, keys.padded_head_dim, device);
  Rows rows(keys, problem.q_heads, problem.q_tokens);

  Params params{};
  static_cast<attention::Problem&>(params) = problem;
  constexpr float kLog2E = 1.44269504088896f;
  params.scale_log2 = problem.scale * kLog2E;
  params.rows = rows.rows;
  params.group = rows.group;
  params.ragged = problem.lengths || (problem.window.tokens > 0 && problem.window.lengths);
  params.own_orders = keys.token_order != values.token_order;
  params.erases = problem.lengths && !keys.pages.table;  // sequences in pages end with a tile
  params.plain = !params.ragged && !params.own_orders && !keys.pages.table && !problem.sequences;

  int64_t segments = int64_t{problem.batch} * keys.kv_heads * rows.blocks;
  int64_t units_each = attention::units_of(keys.tokens, problem.window.tokens), units = segments * units_each;
  int64_t places_each = units_each + attention::segment_places(params.ragged), places = segments * places_each;
  check_sizes(problem, places);
  int tiles = static_cast<int>(attention::tiles_of(keys.tokens));
  int window_units = static_cast<int>(attention::window_units_of(problem.window.tokens));
  params.units_per_segment = cutlass::FastDivmod(static_cast<int>(units_each));
  params.places_per_segment = cutlass::FastDivmod(static_cast<int>(places_each));
  params.row_segments = cutlass::FastDivmod(keys.kv_heads * rows.blocks);
  params.row_blocks = cutlass::FastDivmod(rows.blocks);
  params.query_tokens = cutlass::FastDivmod(problem.q_tokens);

  matmul::KernelLimits limits = kernels.limits(keys.dtype, rows.n);
  params.line_bytes = attention::line_bytes(params.ragged, problem.batch);
  limits.fixed_shared_bytes += params.line_bytes;
  WindowAccess access = window_access(problem);
  params.window_vectorized = access.vectorized;
  bool has_window = problem.window.tokens > 0;
  // By producers, with bulk copies. Segments without any token read an empty stage too.
  params.window_staged = !has_window || (access.staged && limits.one_ring);
  if (has_window && params.window_staged)
    limits.min_block_bytes = std::max(limits.min_block_bytes, attention::kWindowUnitTokens * keys.head_dim * 2);
  Plan plan = choose_plan(device, limits, rows.n, rows.rows, std::max(keys.max_tile_rows, values.max_tile_rows),
                          attention::kStageOrders * attention::kOrderBytes, 0, units, tuning);
  if (problem.num_splits > 0)
    plan.config.ctas = static_cast<int>(std::min<int64_t>(plan.config.ctas, problem.num_splits * segments));
  else if (limits.joins_segments && !params.ragged && tiles > 0)
    cut_by_segments(device, static_cast<int>(segments), tiles, plan.config);
  params.by_segments = plan.config.segment_pieces > 0;
  params.workers = plan.config.workers;
  int pieces = params.by_segments ? plan.config.segment_pieces : plan.config.ctas * plan.config.workers;
  params.pieces = cutlass::FastDivmod(pieces);
  params.window_places = params.by_segments ? attention::window_places(tiles, window_units, pieces) : 0;
  params.cut.all = params.by_segments ? tiles + params.window_places * window_units : static_cast<int>(places);
  params.pieces(params.cut.piece, params.cut.spare, params.cut.all);
  attention::SegmentCut segment_cut{params.pieces, params.cut, window_units, params.window_places};
  params.longest = params.by_segments ? segment_cut.longest() : params.cut.longest();
  params.stages = plan.stages;
  if (!params.by_segments)
    params.partials = workspace((pieces + segments) * attention::partial_bytes(rows.n, keys.padded_head_dim));
  kernels.launch(params, plan.config, stream);
}

}  // namespace cute_kernels::dispatch
