#include "cute_kernels/dispatch/heuristics.hpp"
#include "cute_kernels/dispatch/kernels.hpp"
#include "cute_kernels/dispatch/products.hpp"
#include "cute_kernels/ops/product/stage.hpp"

namespace cute_kernels::dispatch {
namespace {

using format::SparseView;

bool is_aligned(void const* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// May logits be written four at a time?
bool stores_vectors(Product const& p) {
  return p.sparse.tokens % 4 == 0 && is_aligned(p.out, 4 * dtype_bytes(p.out_dtype));
}

// Does every row of p start on 16 bytes?
bool loads_vectors(product::DenseOperand const& p) {
  int elements = 16 / dtype_bytes(p.dtype);
  return is_aligned(p.data, 16) && p.stride_batch % elements == 0 && p.stride_head % elements == 0 &&
         p.stride_token % elements == 0;
}

// Fills in what both products share, and returns how the kernel is laid over the device.
template <class Params>
Plan plan_product(Product const& product, Kernels<Params> const& kernels, int dense_row_bytes,
                  DeviceLimits const& device, Tuning const& tuning, Params& params) {
  SparseView const& view = product.sparse;
  int group = product.query_heads / view.kv_heads, rows = group * product.query_tokens;
  int n = kernels.rows_per_pass(rows), row_blocks = (rows + n - 1) / n;
  int64_t tiles = view.tiles() * row_blocks;
  if (tiles > INT32_MAX / 2) throw std::runtime_error("the product has more than 2^30 tiles; split the batch");

  params.sparse = view;
  params.dense = product.dense;
  params.group = group;
  params.query_tokens = cutlass::FastDivmod(product.query_tokens);

  pipeline::KernelLimits limits = kernels.launcher.limits(view.codec, n);
  Plan plan =
      choose_plan(device, limits, n, rows, view.max_tile_rows, product::kOrderBytes, dense_row_bytes, tiles, tuning);
  int tiles_per_work_tile = static_cast<int>(view.tiles_per_head());
  int work_tiles = static_cast<int>(tiles) / tiles_per_work_tile;
  if (limits.combines_in_cluster) partition_in_clusters(device, work_tiles, tiles_per_work_tile, tiles, plan.config);

  schedule::Params& schedule = params.schedule;
  schedule.batch = view.batch;
  schedule.kv_heads = view.kv_heads;
  schedule.rows = rows;
  schedule.workers = plan.config.workers;
  schedule.by_work_tile = schedule.in_cluster = plan.config.splits_per_work_tile > 0;
  schedule.splits = cutlass::FastDivmod(schedule.by_work_tile ? plan.config.splits_per_work_tile
                                                              : plan.config.ctas * plan.config.workers);
  schedule.partition =
      schedule::make_partition(schedule.by_work_tile ? tiles_per_work_tile : static_cast<int>(tiles), schedule.splits);
  schedule.longest_split = schedule.partition.longest();
  schedule.tiles_per_work_tile = cutlass::FastDivmod(tiles_per_work_tile);
  schedule.cost_per_work_tile = schedule.tiles_per_work_tile;
  schedule.work_tiles_per_row = cutlass::FastDivmod(view.kv_heads * row_blocks);
  schedule.row_blocks = cutlass::FastDivmod(row_blocks);
  params.stages = plan.stages;
  plan.config.in_flight = tiles_in_flight(plan, view.role, view.padded_head_dim, schedule.longest_split);
  return plan;
}

}  // namespace

void run(Product const& product, Workspace const& workspace, std::string const& backend, Tuning const& tuning,
         cudaStream_t stream) {
  SparseView const& view = product.sparse;
  DeviceLimits device = current_device();
  visit_backend(backend, view.padded_head_dim, device, [&](auto kernels) {
    using Backend = decltype(kernels);
    if (view.role == format::Role::kKey) {
      qk::Params params{};
      params.out = product.out;
      params.out_dtype = product.out_dtype;
      params.scale = product.scale;
      params.vector_stores = stores_vectors(product);
      auto kernels = Backend::qk_kernels(view);
      Plan plan = plan_product(product, kernels, 0, device, tuning, params);
      kernels.launcher.launch(params, plan.config, stream);
      return;
    }
    av::Params params{};
    params.vector_loads = loads_vectors(product.dense);
    int row_bytes = product::dense_row_bytes(product.dense.dtype);
    auto av_kernels = Backend::av_kernels(view);
    Plan plan = plan_product(product, av_kernels, row_bytes, device, tuning, params);
    params.output.out = product.out;
    params.output.dtype = view.dtype;
    params.output.channel_order = view.channel_order;
    params.output.order_heads = view.order_heads;
    params.output.head_dim = view.head_dim;
    params.output.vectors = reduce::partial_vectors(params.schedule.rows);
    if (!params.schedule.in_cluster) {
      int64_t partials = reduce::place_partials(params.schedule, plan.config.summed_splits, params.output);
      int64_t bytes = int64_t{plan.config.n} * view.padded_head_dim * static_cast<int>(sizeof(float));
      params.output.partials = workspace(partials * bytes);
    }
    av_kernels.launcher.launch(params, plan.config, stream);
  });
}

}  // namespace cute_kernels::dispatch
