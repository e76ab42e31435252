// Brings the blocks of a decoder's tiles from global memory into its stages.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_kernels/ops/attention/prefill/storage.hpp"

namespace cute_kernels::attention::prefill {

// A stage of a decoder's blocks: a tile's block, and at the end the token order of keys, that of values behind it.
struct BlockStage {
  uint8_t *block, *token_order, *value_order;

  CUTE_DEVICE BlockStage(Params const& params, uint8_t* data)
      : block(data), token_order(data + params.stage_bytes - 2 * kOrderBytes), value_order(token_order + kOrderBytes) {}
};

// Used by one warp of the decoder, which decodes as the others do: so all that can be done once for many operands is.
template <class Traits>
class BlockLoader {
 public:
  CUTE_DEVICE BlockLoader(Params const& params, WorkTile const& work_tile, Storage<Traits>& storage, int decoder)
      : params_(params), work_tile_(work_tile), storage_(storage), decoder_(decoder) {}

  // Starts to copy the block of operand `number`, the index-th of the decoder's, into an empty stage. All lanes of the warp,
  // for all of the decoder's operands in turn: where blocks are is looked up by the lanes for 32 operands at a time, for
  // every look at global memory takes as long as to decode a tile.
  CUTE_DEVICE void load(int number, unsigned index, int stage, uint8_t* data) {
    int lane = threadIdx.x % 32;
    if (index % 32 == 0) {
      storage_.block_sources[decoder_][lane] = source_of(Operand<Traits>(number + lane * kOperandStep<Traits>));
      __syncwarp();
    }
    BlockSource source = storage_.block_sources[decoder_][index % 32];
    if (cute::elect_one_sync()) copy(Operand<Traits>(number), source, stage, data);
    __syncwarp();
  }

 private:
  Params const& params_;
  WorkTile const& work_tile_;
  Storage<Traits>& storage_;
  int decoder_;

  // Token orders only where they are needed: to put keys in the order of the values, and to tell tokens that a query row
  // does not see.
  CUTE_DEVICE BlockSource source_of(Operand<Traits> operand) const {
    BlockSource source{nullptr, 0, 0};
    if (!operand.exists(work_tile_.end - work_tile_.begin)) return source;
    int index = work_tile_.begin + operand.tile;
    KvTile kv_tile = work_tile_.kv_tile(index);
    if (kv_tile.in_window) return source;
    format::SparseView const& view = operand.is_value ? params_.values : params_.keys;
    int64_t tile = view.tile_index(work_tile_.sequence, work_tile_.kv_head, kv_tile.first_token / format::kTileTokens);
    int32_t found = view.look_up_row(tile);
    source.bytes_and_orders = view.rows(tile) * format::kRowBytes;
    source.block = reinterpret_cast<uint8_t const*>(view.blocks + view.first_row(tile, found) * format::kLanes);
    source.tile = static_cast<uint32_t>(tile);
    bool value_order = !operand.is_value && params_.separate_orders;
    if (value_order || index >= work_tile_.first_cut_tile()) source.bytes_and_orders |= BlockSource::kTokenOrder;
    if (value_order) source.bytes_and_orders |= BlockSource::kValueOrder;
    return source;
  }

  CUTE_DEVICE void copy(Operand<Traits> operand, BlockSource source, int stage, uint8_t* data) {
    auto& full = storage_.block_full[decoder_][stage];
    auto policy = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
    if (source.orders() == 0) {
      if (source.bytes() == 0) return full.arrive();
      full.arrive_and_expect_tx(source.bytes());
      return ptx::bulk_copy(data, source.block, source.bytes(), &full, policy);
    }
    BlockStage to(params_, data);
    full.arrive_and_expect_tx(source.bytes() + __popc(source.orders()) * kOrderBytes);
    ptx::bulk_copy(data, source.block, source.bytes(), &full, policy);
    auto copy_order = [&](uint8_t* order, format::SparseView const& view) {
      ptx::bulk_copy(order, view.token_order + int64_t{source.tile} * kOrderBytes, kOrderBytes, &full, policy);
    };
    copy_order(to.token_order, operand.is_value ? params_.values : params_.keys);
    if (source.orders() & BlockSource::kValueOrder) copy_order(to.value_order, params_.values);
  }
};

}  // namespace cute_kernels::attention::prefill
