// Decoder warpgroups: expand a tile's block into an operand stage, a quarter of it by each warp.
#pragma once

#include <cutlass/arch/memory.h>

#include "cute_kernels/ops/attention/prefill/block_loader.hpp"
#include "cute_kernels/ops/attention/prefill/lane_units.hpp"
#include "cute_kernels/ops/attention/prefill/window_copy.hpp"

namespace cute_kernels::attention::prefill {

template <class Traits>
class TileDecoder {
 public:
  using Element = typename Traits::Element;
  using TileFormat = typename Traits::TileFormat;
  using Order = typename Traits::Order;

  // blocks: the stages of this decoder.
  CUTE_DEVICE TileDecoder(Params const& params, WorkTile const& work_tile, Storage<Traits>& storage, uint8_t* blocks,
                          int decoder)
      : params_(params),
        work_tile_(work_tile),
        storage_(storage),
        blocks_(blocks),
        stages_(cast_smem_ptr_to_uint(storage.stages)),
        decoder_(decoder),
        window_tiles_(work_tile.window_tiles()),
        first_cut_tile_(work_tile.first_cut_tile() - work_tile.begin),
        first_operand_(decoder),
        quarter_(__shfl_sync(~0u, quarter_of_warp(decoder), 0)),
        lane_(threadIdx.x % 32) {
    if constexpr (Traits::kClusterCtas > 1) first_operand_ += Traits::kDecoders * cute::block_rank_in_cluster();
    key_row_ = key_row(position(0));
    unsigned channel = Traits::kHeadDim / kWarpgroupWarps * quarter_ + Order::lane_row(lane_);
    value_row_ = value_address(0, Order::row_of_channel(channel), Order::lane_column(lane_));
  }

  CUTE_DEVICE void run() {
    BlockLoader<Traits> loader(params_, work_tile_, storage_, decoder_);
    int tiles = work_tile_.end - work_tile_.begin;
    if (Traits::kClusterCtas > 1 && tiles == 0) return;  // no consumer would wait for operands
    int operands = (Operand<Traits>::count(tiles) - first_operand_ + kOperandStep<Traits> - 1) / kOperandStep<Traits>;
    int ahead = params_.block_stages;  // so many steps load a block and decode none
    int loads = quarter_ == kLoadingQuarter ? operands - ahead : -ahead;
    prefetch_window();
    Operand<Traits> operand(first_operand_);
    static_assert(kOperandStep<Traits> <= Traits::kStages, "the first operand's stage is its number");
    Stage<Traits> stage{static_cast<unsigned>(first_operand_)};
    uint8_t* block = blocks_;
    int block_stage = 0, block_phase = 1;
    CUTE_NO_UNROLL
    for (int index = -ahead; index < operands; ++index) {
      if (index >= 0) {
        wait_together(storage_.block_full[decoder_][block_stage], block_phase);
        storage_.wait_empty(stage);
        bool exists = operand.exists(tiles), with_order = !operand.is_value && operand.tile >= first_cut_tile_;
        if (exists) decode(operand, {params_, block}, stage.index, index / kKeysEvery & 1, with_order);
        storage_.fill(stage.index, quarter_, exists, with_order);
        storage_.release_block(decoder_, block_stage);
        operand.template advance<kOperandStep<Traits>>();
        stage.advance(kOperandStep<Traits>);
      }
      if (index < loads) {
        int next = index + ahead;
        storage_.wait_block_empty(decoder_, block_stage, block_phase);
        loader.load(first_operand_ + next * kOperandStep<Traits>, next, block_stage, block);
      }
      ++block_stage, block += params_.stage_bytes;
      if (block_stage == ahead) block_stage = 0, block = blocks_, block_phase ^= 1;
    }
    if constexpr (Traits::kClusterCtas > 1) storage_.wait_all_empty(stage);
  }

 private:
  Params const& params_;
  WorkTile const& work_tile_;
  Storage<Traits>& storage_;
  uint8_t* blocks_;
  uint32_t stages_;
  int decoder_, window_tiles_, first_cut_tile_, first_operand_, quarter_, lane_;
  uint32_t key_row_, value_row_;  // where the lane's first row begins in the first stage

  // Of the operands of a decoder that has keys, every so many-th is of keys.
  static constexpr int kKeysEvery = kOperandStep<Traits> % 2 == 0 ? 1 : 2;
  static constexpr int kStageBytes = Traits::kStageElements * sizeof(Element);

  // Tiles of the window come first: they arrive while blocks are looked up.
  CUTE_DEVICE void prefetch_window() const {
    CUTE_NO_UNROLL
    for (int number = first_operand_; number < Operand<Traits>::count(window_tiles_); number += kOperandStep<Traits>) {
      Operand<Traits> operand(number);
      if (operand.exists(window_tiles_)) window_copy(operand).prefetch(window_token(operand));
    }
  }

  // parity: of the decoder's keys.
  CUTE_DEVICE void decode(Operand<Traits> operand, BlockStage const& from, int stage, int parity, bool with_order) {
    if (operand.tile < window_tiles_)
      window_copy(operand).run(window_token(operand), stages_ + stage * kStageBytes);
    else if (operand.is_value)
      decode_values(from, operand.tile - window_tiles_, stage);
    else
      decode_keys(from, stage, parity, with_order);
  }

  CUTE_DEVICE WindowCopy<Traits> window_copy(Operand<Traits> operand) const {
    return {params_, work_tile_, storage_, decoder_, operand.is_value};
  }
  // The first token of the operand's tile in the window.
  CUTE_DEVICE int window_token(Operand<Traits> operand) const {
    return work_tile_.kv_tile(work_tile_.begin + operand.tile).first_token;
  }

  // Shared-memory address of an element of an operand stage.
  CUTE_DEVICE uint32_t key_address(int stage, unsigned row, unsigned channel) const {
    typename Traits::template Offsets<typename Traits::SmemLayoutK> layout;  // (tokens,channels)
    return stages_ + (stage * Traits::kStageElements + layout(row, channel)) * static_cast<int>(sizeof(Element));
  }
  CUTE_DEVICE uint32_t value_address(int stage, unsigned row, unsigned column) const {
    typename Traits::template Offsets<typename Traits::SmemLayoutV> layout;  // (channels,tokens)
    return stages_ + (stage * Traits::kStageElements + layout(row, column)) * static_cast<int>(sizeof(Element));
  }

  // The lane's positions of tokens, and where elements of a token begin in the first stage.
  CUTE_DEVICE unsigned position(int i) const { return 16 * quarter_ + Order::lane_row(lane_) + 8 * i; }
  CUTE_DEVICE uint32_t key_row(unsigned position) const {
    return key_address(0, Order::row_of_token(position), Order::lane_column(lane_));
  }

  // With the tokens in the order of the values, so that P comes out in the order that V has.
  CUTE_DEVICE void decode_keys(BlockStage const& from, int stage, int parity, bool with_order) {
    uint8_t const* order = from.token_order;
    uint32_t rows[2] = {key_row_, rows_on(key_row_, Order::kTokenRowsApart)};
    if (params_.separate_orders) {
      order = from.value_order;
      uint8_t* positions = storage_.positions[decoder_][parity];
      int thread = threadIdx.x % kWarpgroupThreads;
      if (thread < format::kTileTokens) positions[order[thread]] = static_cast<uint8_t>(thread);
      sync_warpgroup();
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) rows[i] = key_row(positions[from.token_order[position(i)]]);
    }
    if (with_order && lane_ < 4)
      reinterpret_cast<uint32_t*>(storage_.token_order[stage])[4 * quarter_ + lane_] =
          reinterpret_cast<uint32_t const*>(order)[4 * quarter_ + lane_];
    // Blocks are side by side, as those of the swizzled layout are.
    constexpr int kBlockBytes = Traits::kTokens * 64 * sizeof(Element);
    CUTE_UNROLL
    for (uint32_t& row : rows) row += stage * kStageBytes;
    decode_blocks<format::Role::kKey, kBlockBytes>(from, rows);
  }

  // tile: of the sequence's compressed ones.
  CUTE_DEVICE void decode_values(BlockStage const& from, int tile, int stage) {
    constexpr int kBlockBytes = 16 * 64 * sizeof(Element);
    uint32_t row = value_row_ + stage * kStageBytes, rows[2] = {row, rows_on(row, 8)};
    decode_blocks<format::Role::kValue, kBlockBytes>(from, rows);
    int tokens = work_tile_.tokens - tile * format::kTileTokens;
    if (params_.zero_masked && tokens < format::kTileTokens) zero_values(from.token_order, tokens, stage);
  }

  // Elements of tokens from `tokens` on, in the rows of the warp's channels.
  CUTE_DEVICE void zero_values(uint8_t const* token_order, int tokens, int stage) {
    constexpr int kRows = Traits::kHeadDim / kWarpgroupWarps, kRowUnits = format::kTileTokens / kUnitColumns;
    __syncwarp();
    CUTE_NO_UNROLL
    for (int i = lane_; i < kRows * kRowUnits; i += 32) {
      unsigned channel = kRows * quarter_ + i / kRowUnits, column = i % kRowUnits * kUnitColumns;
      uint32_t unit = value_address(stage, Order::row_of_channel(channel), column), pairs[4];
      cutlass::arch::shared_load<16>(pairs, unit);
      auto counts = [&](int j) { return token_order[Order::position_of_column(column + j)] < tokens; };
      CUTE_UNROLL
      for (int pair = 0; pair < 4; ++pair)
        pairs[pair] &= (counts(2 * pair) ? 0xffffu : 0u) | (counts(2 * pair + 1) ? 0xffff0000u : 0u);
      cutlass::arch::shared_store<16>(unit, pairs);
    }
  }

  // rows: where the lane's first units of two rows go of the first block; those of the next block kBlockBytes further on.
  template <format::Role kRole, int kBlockBytes>
  CUTE_DEVICE void decode_blocks(BlockStage const& from, uint32_t const (&rows)[2]) {
    with_codec([&](auto codec) {
      using Units = LaneUnits<TileFormat, decltype(codec), Element, kRole, Traits::kHeadDim>;
      Units units(cast_smem_ptr_to_uint(from.block), quarter_,
                  cast_smem_ptr_to_uint(storage_.scale_scratch[decoder_][quarter_]));
#pragma unroll(Units::kUnrolls ? Units::kSteps : 1)
      for (int step = 0; step < Units::kSteps; ++step) {
        units.decode(step, [&](int block, int row, int unit, uint32_t const(&elements)[4]) {
          // The units of a row are swizzled: some units further on is an exclusive or.
          uint32_t to = rows[row] ^ (Order::kUnitsApart * kUnitBytes * unit);
          cutlass::arch::shared_store<16>(to + (Units::kStepBlocks * step + block) * kBlockBytes, elements);
        });
      }
    });
  }

  // f(codec) with that of the cache.
  template <class F>
  CUTE_DEVICE void with_codec(F&& f) {
    if constexpr (Traits::kDecodesNarrow) {
      switch (params_.keys.codec) {
        case format::CodecId::kFp8:
          return f(format::Fp8Codec{});
        case format::CodecId::kInt8:
          return f(format::Int8Codec{});
        case format::CodecId::kInt4:
          return f(format::Int4Codec{});
        default:
          break;
      }
    }
    if constexpr (Traits::kDecodesOwn) f(typename Traits::OwnCodec{});
  }
};

}  // namespace cute_kernels::attention::prefill
