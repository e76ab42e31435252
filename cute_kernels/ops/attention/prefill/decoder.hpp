// Decoder warpgroups: bring a tile's block into shared memory and expand it into an operand stage, a quarter of it by
// each warp.
#pragma once

#include <cutlass/arch/memory.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_kernels/mma/quarter_tile.hpp"
#include "cute_kernels/ops/attention/prefill/storage.hpp"

namespace cute_kernels::attention::prefill {

// A stage of a decoder's blocks: a tile's block, and at the end the token order of keys, that of values behind it.
struct BlockStage {
  uint8_t *block, *token_order, *value_order;

  CUTE_DEVICE BlockStage(Params const& params, uint8_t* data)
      : block(data), token_order(data + params.stage_bytes - 2 * kOrderBytes), value_order(token_order + kOrderBytes) {}
};

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
        warp_(__shfl_sync(~0u, threadIdx.x / 32 % kWarpgroupWarps, 0)),
        lane_(threadIdx.x % 32) {
    if constexpr (Traits::kClusterCtas > 1) first_operand_ += Traits::kDecoders * cute::block_rank_in_cluster();
  }

  CUTE_DEVICE void run() {
    int tiles = work_tile_.end - work_tile_.begin, operands = Operand<Traits>::count(tiles);
    int own_operands = max(0, operands - first_operand_ + kOperandStep - 1) / kOperandStep;
    BlockLoader loader(*this, tiles);
    if (warp_ == kLoadingWarp) {
      for (int i = 0; i < min(params_.block_stages, own_operands); ++i) loader.load_next(i);
    }
    int block = 0, phase = 0;  // stages of blocks
    CUTE_NO_UNROLL
    for (int i = 0; i < own_operands; ++i) {
      unsigned number = first_operand_ + i * kOperandStep;
      Operand<Traits> operand(number);
      storage_.block_full[decoder_][block].wait(phase);
      ptx::compiler_fence();
      storage_.wait_empty(number);
      bool exists = operand.exists(tiles), with_order = !operand.is_value && operand.tile >= first_cut_tile_;
      if (exists) decode(operand, block_at(block), number % Traits::kStages, i % 2, with_order);
      storage_.fill(number, exists, with_order);
      // All warps have read the block.
      if (warp_ == kLoadingWarp && loader.loaded() < own_operands) loader.load_next(block);
      if (++block == params_.block_stages) block = 0, phase ^= 1;
    }
  }

 private:
  using Quarter = mma::QuarterTile<TileFormat, typename Traits::Codec, Traits::kHeadDim>;
  static_assert(Quarter::kWordAtoms * 16 == 64 && format::kTileTokens == 64);

  Params const& params_;
  WorkTile const& work_tile_;
  Storage<Traits>& storage_;
  uint8_t* blocks_;
  uint32_t stages_;
  int decoder_, window_tiles_, first_cut_tile_, first_operand_, warp_, lane_;

  static constexpr int kOperandStep = Traits::kDecoders * Traits::kClusterCtas;

  CUTE_DEVICE BlockStage block_at(int index) const { return {params_, blocks_ + index * params_.stage_bytes}; }

  // Issues the decoder's bulk copies, one operand after the other. Where a block is, is looked up by a warp's lanes for 32
  // operands at a time: every look at global memory takes as long as to decode a tile.
  class BlockLoader {
   public:
    CUTE_DEVICE BlockLoader(TileDecoder& decoder, int tiles) : decoder_(decoder), tiles_(tiles) {}

    CUTE_DEVICE int loaded() const { return loaded_; }

    // With all lanes of one warp, into a stage that is empty: the lane that has looked the operand up copies its block.
    CUTE_DEVICE void load_next(int stage) {
      int source = loaded_ % 32, number = decoder_.first_operand_ + (loaded_ - source + decoder_.lane_) * kOperandStep;
      if (source == 0) look_up(number);
      if (decoder_.lane_ == source) copy(Operand<Traits>(number), stage);
      __syncwarp();
      ++loaded_;
    }

   private:
    TileDecoder& decoder_;
    int tiles_, loaded_ = 0;
    uint8_t const *block_, *token_order_;
    int bytes_;  // 0: a tile of the window or none, which is not loaded

    CUTE_DEVICE void look_up(int number) {
      bytes_ = 0;
      Operand<Traits> operand(number);
      if (!operand.exists(tiles_)) return;
      WorkTile const& work_tile = decoder_.work_tile_;
      KvTile kv_tile = work_tile.kv_tile(work_tile.begin + operand.tile);
      if (kv_tile.in_window) return;
      format::SparseView const& view = operand.is_value ? decoder_.params_.values : decoder_.params_.keys;
      int64_t tile = view.tile_index(work_tile.sequence, work_tile.kv_head, kv_tile.first_token / format::kTileTokens);
      block_ = reinterpret_cast<uint8_t const*>(view.blocks + view.first_row(tile) * format::kLanes);
      token_order_ = view.token_order + tile * kOrderBytes;
      bytes_ = view.rows(tile) * format::kRowBytes;
    }

    // Token orders only where they are needed: to put keys in the order of the values, and to tell tokens that a query row
    // does not see.
    CUTE_DEVICE void copy(Operand<Traits> operand, int stage) {
      Params const& params = decoder_.params_;
      auto& full = decoder_.storage_.block_full[decoder_.decoder_][stage];
      if (bytes_ == 0) return full.arrive();
      bool value_order = !operand.is_value && params.separate_orders;
      bool token_order = value_order || operand.tile >= decoder_.first_cut_tile_;
      BlockStage to = decoder_.block_at(stage);
      auto policy = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
      full.arrive_and_expect_tx(bytes_ + (token_order + value_order) * kOrderBytes);
      ptx::bulk_copy(to.block, block_, bytes_, &full, policy);
      if (token_order) ptx::bulk_copy(to.token_order, token_order_, kOrderBytes, &full, policy);
      if (value_order)
        ptx::bulk_copy(to.value_order, params.values.token_order + (token_order_ - params.keys.token_order),
                       kOrderBytes, &full, policy);
    }
  };

  // parity: of the decoder's operands.
  CUTE_DEVICE void decode(Operand<Traits> operand, BlockStage const& from, int stage, int parity, bool with_order) {
    if (operand.tile < window_tiles_)
      copy_window_tile(operand.is_value, work_tile_.kv_tile(work_tile_.begin + operand.tile).first_token, stage);
    else if (operand.is_value)
      decode_values(from, operand.tile - window_tiles_, stage);
    else
      decode_keys(from, stage, parity, with_order);
  }

  // Shared-memory address of an element of an operand stage.
  CUTE_DEVICE uint32_t key_address(int stage, int row, int channel) const {
    typename Traits::template Offsets<typename Traits::SmemLayoutK> layout;  // (tokens,channels)
    return stages_ + (stage * Traits::kStageElements + layout(row, channel)) * static_cast<int>(sizeof(Element));
  }
  CUTE_DEVICE uint32_t value_address(int stage, int row, int column) const {
    typename Traits::template Offsets<typename Traits::SmemLayoutV> layout;  // (channels,tokens)
    return stages_ + (stage * Traits::kStageElements + layout(row, column)) * static_cast<int>(sizeof(Element));
  }

  // With the tokens in the order of the values, so that P comes out in the order that V has.
  CUTE_DEVICE void decode_keys(BlockStage const& from, int stage, int parity, bool with_order) {
    uint8_t const* order = from.token_order;
    int position[2] = {16 * warp_ + lane_ / 4, 16 * warp_ + lane_ / 4 + 8};  // of the lane's tokens
    if (params_.separate_orders) {
      order = from.value_order;
      uint8_t* positions = storage_.positions[decoder_][parity];
      int thread = threadIdx.x % kWarpgroupThreads;
      if (thread < format::kTileTokens) positions[order[thread]] = static_cast<uint8_t>(thread);
      sync_warpgroup();
      for (int& p : position) p = positions[from.token_order[p]];
    }
    if (with_order && lane_ < 4)
      reinterpret_cast<uint32_t*>(storage_.token_order[stage])[4 * warp_ + lane_] =
          reinterpret_cast<uint32_t const*>(order)[4 * warp_ + lane_];
    // A word has 64 channels, as many as a block of the swizzled layout.
    constexpr int kWordBytes = Traits::kTokens * 64 * sizeof(Element);
    uint32_t rows[2];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) rows[i] = key_address(stage, Order::row_of_token(position[i]), unit_column());
    decode_words<kWordBytes>(from, rows, [](uint32_t*, int) {});
  }

  // tile: of the sequence's compressed ones.
  CUTE_DEVICE void decode_values(BlockStage const& from, int tile, int stage) {
    // A word has 16 channels, all tokens.
    constexpr int kWordBytes = 16 * 64 * sizeof(Element);
    int channel = Traits::kHeadDim / kWarpgroupWarps * warp_ + lane_ / 4;
    uint32_t rows[2];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) rows[i] = value_address(stage, Order::row_of_channel(channel + 8 * i), unit_column());
    if (params_.zero_masked && (tile + 1) * format::kTileTokens > work_tile_.tokens) {
      int tokens = work_tile_.tokens - tile * format::kTileTokens;
      decode_words<kWordBytes>(from, rows, [&](uint32_t* registers, int atom) {
        // Columns 2t, 2t + 1 of 16, then 8 further on; see TileFormat::ColumnPositions.
        CUTE_UNROLL
        for (int pair = 0; pair < 2; ++pair) {
          uint8_t const* order = from.token_order + 16 * atom + 2 * (lane_ % 4) + pair;
          uint32_t counts = (order[0] < tokens ? 0xffffu : 0u) | (order[8] < tokens ? 0xffff0000u : 0u);
          registers[2 * pair] &= counts, registers[2 * pair + 1] &= counts;
        }
      });
    } else {
      decode_words<kWordBytes>(from, rows, [](uint32_t*, int) {});
    }
  }

  // Of the lane's first 16 bytes in a row.
  CUTE_DEVICE int unit_column() const { return lane_ % 4 * Order::kUnitColumns; }

  // rows: where the lane's first 16 bytes of two rows, 8 apart in the fragments, go of the first word; those of the next
  // word kWordBytes further on. edit(registers of an atom, atom of the word): before that.
  template <int kWordBytes, class Edit>
  CUTE_DEVICE void decode_words(BlockStage const& from, uint32_t const (&rows)[2], Edit&& edit) {
    Quarter quarter(cast_smem_ptr_to_uint(from.block), warp_);
    CUTE_UNROLL
    for (int step = 0; step < Quarter::kSteps; ++step) {
      Tensor registers = make_tensor<uint32_t>(Int<4 * Quarter::kWordAtoms * Quarter::kStepWords>{});
      quarter.decode(step, registers);
      CUTE_UNROLL
      for (int i = 0; i < Quarter::kStepWords; ++i) {
        uint32_t* word = &registers(4 * Quarter::kWordAtoms * i);
        CUTE_UNROLL
        for (int atom = 0; atom < Quarter::kWordAtoms; ++atom) edit(word + 4 * atom, atom);
        int offset = (Quarter::kStepWords * step + i) * kWordBytes;
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          uint32_t const *a = word + 8 * half, *b = a + 4;  // two atoms
          // The units of a row are swizzled: four units further on is an exclusive or.
          uint32_t const first[4] = {a[0], b[0], a[2], b[2]}, second[4] = {a[1], b[1], a[3], b[3]};
          cutlass::arch::shared_store<16>((rows[0] + offset) ^ (64 * half), first);
          cutlass::arch::shared_store<16>((rows[1] + offset) ^ (64 * half), second);
        }
      }
    }
  }

  // Dense tokens, 8 elements at a time: keys in the order of the compressed keys' channels, values in that of theirs.
  // Zeros beyond the last.
  CUTE_DEVICE void copy_window_tile(bool is_value, int first_token, int stage) {
    format::SparseView const& view = is_value ? params_.values : params_.keys;
    int64_t const* strides = is_value ? params_.window.value_strides : params_.window.key_strides;
    auto const* from = static_cast<Element const*>(is_value ? params_.window.values : params_.window.keys) +
                       work_tile_.sequence * strides[0] + work_tile_.kv_head * strides[1] + first_token * strides[2];
    uint8_t const* channel_order = view.channel_order_of(work_tile_.sequence, work_tile_.kv_head);
    int tokens = work_tile_.window_tokens - first_token;
    auto element = [&](int token, int channel) {
      return token < tokens && channel < view.head_dim ? from[token * strides[2] + channel] : Element(0.f);
    };
    CUTE_NO_UNROLL
    for (int i = threadIdx.x % kWarpgroupThreads; i < Traits::kStageElements / 8; i += kWarpgroupThreads) {
      alignas(16) Element elements[8];
      uint32_t to;
      if (is_value) {
        int row = i % Traits::kHeadDim, column = i / Traits::kHeadDim * 8;
        int channel = __ldg(channel_order + Order::channel_of_row(row));
        CUTE_UNROLL
        for (int j = 0; j < 8; ++j) elements[j] = element(column + j, channel);
        to = value_address(stage, row, column);
      } else {
        int row = i / (Traits::kHeadDim / 8), column = i % (Traits::kHeadDim / 8) * 8;
        CUTE_UNROLL
        for (int j = 0; j < 8; ++j)
          elements[j] = element(row, __ldg(channel_order + Order::position_of_column(column + j)));
        to = key_address(stage, row, column);
      }
      cutlass::arch::shared_store<16>(to, elements);
    }
  }
};

}  // namespace cute_kernels::attention::prefill
