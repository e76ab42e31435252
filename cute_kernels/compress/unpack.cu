// Unpacks tiles, four warps a tile. A block is decoded as the MMA kernels do it, and its A fragments are put down in
// shared memory, tokens and channels in the order of their positions; from there rows of the dense tensor are written.
#include <cute/arch/copy_sm75.hpp>
#include <cute/tensor.hpp>

#include "cute_kernels/common/numeric.hpp"
#include "cute_kernels/compress/pages.hpp"
#include "cute_kernels/compress/tile_kernel.hpp"
#include "cute_kernels/mma/quarter_tile.hpp"

namespace cute_kernels::compress {
namespace {

using namespace format;

constexpr int kWarps = 4, kThreads = 32 * kWarps;

// A base of what follows for codecs with scales: of the rows and channels of dense.
template <int HeadDim, bool kScales>
struct UnpackScales {};
template <int HeadDim>
struct UnpackScales<HeadDim, true> {
  float of_row[kTileTokens], of_channel[HeadDim];
};

// Codec_: Fp16Codec for all of 16 bits, which are moved bit for bit.
template <class Codec_, int HeadDim>
struct UnpackStorage : UnpackScales<HeadDim, Codec_::kHasScales> {
  using Codec = Codec_;
  static constexpr int kStride = HeadDim + 8;  // rows in different banks
  static constexpr int kLaneChannels = HeadDim / 32;

  alignas(16) uint16_t dense[kTileTokens][kStride];
  alignas(16) uint8_t column[HeadDim];  // of dense, by channel
  uint8_t token[kTileTokens];           // by row of dense
  alignas(128) uint32_t block[];        // and rows behind it

  static size_t bytes(SparseView const& view) {
    return sizeof(UnpackStorage) +
           (view.max_tile_rows + mma::Decoder<TileFormat, Codec>::kRowsBehind) * size_t{kRowBytes};
  }
};

// What a tile is unpacked from.
struct PackedTile {
  uint32_t const* block;
  int rows;
  uint8_t const *token_order, *channel_order;
  uint16_t const* channel_scale;  // null without scales
};

// Where MMA column `column` of A is among positions, and so are rows.
template <Role kRole>
__device__ void load_orders(uint8_t const* token_order, uint8_t const* channel_order, int head_dim, uint8_t* token,
                            uint8_t* column) {
  constexpr bool kIsKey = kRole == Role::kKey;
  auto position = [](bool along_k, int i) { return along_k ? TileFormat::position_of_column(i) : i; };
  int thread = threadIdx.x;
  if (thread < kTileTokens) token[thread] = token_order[position(!kIsKey, thread)];
  for (int i = thread; i < head_dim; i += kThreads)
    column[channel_order[position(kIsKey, i)]] = static_cast<uint8_t>(i);
}

// The scales of the tile's rows and channels. The block is in shared memory.
template <Role kRole, class Codec, int HeadDim>
__device__ void load_scales(UnpackStorage<Codec, HeadDim>& s, PackedTile const& tile) {
  constexpr bool kIsKey = kRole == Role::kKey;
  auto position = [](bool along_k, int i) { return along_k ? TileFormat::position_of_column(i) : i; };
  auto const* of_token = reinterpret_cast<uint16_t const*>(s.block + TileFormat::bitmap_rows(HeadDim) * kLanes);
  int thread = threadIdx.x;
  if (thread < kTileTokens) s.of_row[thread] = scale_value(of_token[scale_index(position(!kIsKey, thread))]);
  for (int p = thread; p < HeadDim; p += kThreads)
    s.of_channel[tile.channel_order[p]] = scale_value(tile.channel_scale[p]);
}

// A warp's quarter of the tile's elements into dense: of a codec with scales the numbers of its codes, as fp16.
template <Role kRole, class Codec, int HeadDim>
__device__ void decode_quarter(UnpackStorage<Codec, HeadDim>& s) {
  using Quarter = mma::QuarterTile<TileFormat, Codec, HeadDim>;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Quarter quarter(cute::cast_smem_ptr_to_uint(s.block), warp);
#pragma unroll
  for (int step = 0; step < Quarter::kSteps; ++step) {
    cute::Tensor registers = cute::make_tensor<uint32_t>(cute::Int<4 * Quarter::kWordAtoms * Quarter::kStepWords>{});
    quarter.decode(step, registers);
#pragma unroll
    for (int i = 0; i < cute::size(registers); ++i) {
      // Register i % 4 of an A fragment: 8 rows further on if odd, 8 columns if above 1.
      int word = step * Quarter::kStepWords + i / 4 / Quarter::kWordAtoms, atom = i / 4 % Quarter::kWordAtoms;
      int m = 8 * (i % 2), k = 16 * atom + 8 * (i / 2 % 2);
      uint32_t pair = registers(i);
      uint16_t* to;
      if (kRole == Role::kKey) {
        to = &s.dense[16 * warp + m + lane / 4][64 * word + k + 2 * (lane % 4)];
      } else {
        cute::SM75_U32x1_MOVM_T::copy(registers(i), pair);
        to = &s.dense[k + lane / 4][16 * (Quarter::kWords * warp + word) + m + 2 * (lane % 4)];
      }
      *reinterpret_cast<uint32_t*>(to) = pair;
    }
  }
}

// to: (tokens, head_dim).
template <class Codec, int HeadDim>
__device__ void store_rows(UnpackStorage<Codec, HeadDim> const& s, DType dtype, int tokens, int head_dim,
                           uint16_t* to) {
  constexpr int kChannels = UnpackStorage<Codec, HeadDim>::kLaneChannels;
  int warp = threadIdx.x / 32, first = threadIdx.x % 32 * kChannels;
  if (first >= head_dim) return;
  int column[kChannels];
#pragma unroll
  for (int i = 0; i < kChannels; ++i) column[i] = s.column[first + i];
#pragma unroll 8
  for (int row = warp; row < kTileTokens; row += kWarps) {
    alignas(16) uint16_t values[kChannels];
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      values[i] = s.dense[row][column[i]];
      if constexpr (Codec::kHasScales)
        values[i] = rounded_bits(
            scaled_up(float(half_t::bitcast(values[i])), s.of_row[row], s.of_channel[first + i], dtype), dtype);
    }
    using Vector = std::conditional_t<kChannels == 2, uint32_t, std::conditional_t<kChannels == 4, uint2, uint4>>;
    static_assert(sizeof(Vector) == sizeof(values));
    int token = s.token[row];
    if (token < tokens) *reinterpret_cast<Vector*>(to + token * head_dim + first) = *reinterpret_cast<Vector*>(values);
  }
}

// to: (tokens, head_dim).
template <Role kRole, class Codec, int HeadDim>
__device__ void unpack_tile(UnpackStorage<Codec, HeadDim>& s, PackedTile const& tile, DType dtype, int tokens,
                            int head_dim, uint16_t* to) {
  constexpr int kVectors = kRowBytes / sizeof(uint4);  // of a row
  for (int i = threadIdx.x; i < tile.rows * kVectors; i += kThreads)
    reinterpret_cast<uint4*>(s.block)[i] = __ldg(reinterpret_cast<uint4 const*>(tile.block) + i);
  load_orders<kRole>(tile.token_order, tile.channel_order, HeadDim, s.token, s.column);
  __syncthreads();
  if constexpr (Codec::kHasScales) load_scales<kRole>(s, tile);
  decode_quarter<kRole>(s);
  __syncthreads();
  store_rows(s, dtype, tokens, head_dim, to);
}

template <Role kRole, class Codec, int HeadDim>
__global__ void __launch_bounds__(kThreads) unpack_kernel(SparseView view, uint16_t* out) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& s = *reinterpret_cast<UnpackStorage<Codec, HeadDim>*>(shared);
  TileLocation tile(view);
  PackedTile packed{tile.block, tile.rows, view.token_order + tile.index * kTileTokens,
                    view.channel_order + tile.head * HeadDim,
                    Codec::kHasScales ? view.channel_scale + tile.head * HeadDim : nullptr};
  unpack_tile<kRole>(s, packed, view.dtype, tile.tokens, view.head_dim,
                     out + (tile.head * view.tokens + tile.first_token) * view.head_dim);
}

template <Role kRole, class Codec, int HeadDim>
__global__ void __launch_bounds__(kThreads) load_kernel(SparseView view, TileRun run, uint16_t* out, int32_t* error) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& s = *reinterpret_cast<UnpackStorage<Codec, HeadDim>*>(shared);
  int head = blockIdx.x / run.tiles, values = kTileTokens * view.head_dim;
  int64_t slot = find_slot(view, run.sequence, head, run.first_tile + blockIdx.x % run.tiles);
  if (slot == kNoSlot) {
    uint16_t* to = out + int64_t{blockIdx.x} * values;
#pragma unroll 1
    for (int i = threadIdx.x; i < values; i += kThreads) to[i] = 0;
    if (threadIdx.x == 0) *error = 1;
    return;
  }
  PackedTile packed{view.blocks + view.first_row(slot) * kLanes, view.rows(slot), view.token_order + slot * kTileTokens,
                    view.channel_order_of(run.sequence, head), view.channel_scale_of(run.sequence, head)};
  unpack_tile<kRole>(s, packed, view.dtype, kTileTokens, view.head_dim,
                     out + int64_t{blockIdx.x} * kTileTokens * view.head_dim);
}

}  // namespace

void decompress(SparseView const& view, void* out, cudaStream_t stream) {
  if (view.tile_format == TileFormatId::kTwoOfFour) return unpack_two_of_four(view, out, stream);
  if (view.tile_format == TileFormatId::kTwoOfFourBitmap) return unpack_slots(view, out, stream);
  visit_packed_codec(view.codec, [&](auto codec) {
    visit_shape(view, [&](auto role, auto head_dim) {
      using Storage = UnpackStorage<decltype(codec), head_dim()>;
      launch_tiles(unpack_kernel<role(), decltype(codec), head_dim()>, view.tiles(), kThreads, Storage::bytes(view),
                   stream, "launch of decompress", view, static_cast<uint16_t*>(out));
    });
  });
}

void load(Pool const& pool, TileRun const& run, void* keys, void* values, cudaStream_t stream) {
  for (SparseView const* view : {&pool.keys, &pool.values})
    visit_packed_codec(view->codec, [&](auto codec) {
      visit_shape(*view, [&](auto role, auto head_dim) {
        launch_tiles(load_kernel<role(), decltype(codec), head_dim()>, int64_t{view->kv_heads} * run.tiles, kThreads,
                     UnpackStorage<decltype(codec), head_dim()>::bytes(*view), stream, "launch of load", *view, run,
                     static_cast<uint16_t*>(view == &pool.keys ? keys : values), pool.error);
      });
    });
}

}  // namespace cute_kernels::compress
