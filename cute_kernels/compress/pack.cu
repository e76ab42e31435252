// Packs tiles, one CTA a tile. The dense tile arrives in shared memory with its rows in position order. A warp then
// takes a run of every lane's elements: it builds their bitmap words from the rows of bits that `balance` left, and
// copies the values that are present, in order, to where their stream has come. Which element is which is known at
// compile time, from element_layout; what differs from lane to lane is only where a row and a channel begin.
#include <cute/arch/copy_sm80.hpp>
#include <cute/pointer.hpp>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/compress/tile_kernel.hpp"

namespace cute_kernels::compress {
namespace {

using namespace format;

constexpr int kStreams = Codec16::kStreams;
constexpr int kVectorValues = 8;  // of 16 bits in 16 bytes
constexpr int kSwizzledRows = 8;
constexpr int kBatch = 4;         // values on their way from one place in shared memory to another

constexpr int warps_of(int head_dim) { return head_dim == kMaxHeadDim ? 4 : 2; }

template <int HeadDim>
struct PackStorage {
  static constexpr int kWarps = warps_of(HeadDim);

  alignas(16) uint16_t dense[kTileTokens][HeadDim];  // by token position and channel, see `swizzled`
  alignas(16) uint32_t bits[kTileTokens][HeadDim / 32];  // by token and channel position
  uint8_t channel[HeadDim];                              // by position
  uint32_t lengths[kWarps][kLanes];                      // of the streams, 16 bits each
  alignas(16) uint16_t values[][kLanes][kStreams];       // staged value rows
};

// Where a channel is in a row of the dense tile. Rows start in the same bank, and lanes of different rows often want
// the same channel: within 8 rows its vector moves to 8 places.
__device__ constexpr int swizzled(int row, int channel) { return channel ^ (row % kSwizzledRows) * kVectorValues; }

// Bits of a bitmap word that are of one stream.
__device__ constexpr uint32_t stream_bits(int stream) {
  uint32_t bits = 0;
  for (int e = 0; e < kWordElements; ++e)
    if (Codec16::stream(e) == stream) bits |= 1u << bitmap_bit(e);
  return bits;
}

template <int HeadDim>
__device__ void load_tile(PackStorage<HeadDim>& s, DenseView const& x, uint32_t const* masks, SparseView const& view,
                          TilePlace const& place, bool vectors) {
  constexpr int kThreads = 32 * warps_of(HeadDim), kRowVectors = HeadDim / kVectorValues;
  constexpr int kVectors = kTileTokens * kRowVectors / kThreads, kRowStep = kThreads / kRowVectors;
  static_assert(kThreads % kRowVectors == 0, "a thread stays in its column of vectors");
  uint16_t const* from = x.row(place.head, place.first_token);
  uint8_t const* order = view.token_order + place.tile * kTileTokens;
  int column = threadIdx.x % kRowVectors, first_row = threadIdx.x / kRowVectors;
  unsigned token[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) token[i] = order[first_row + i * kRowStep];

  constexpr int kBitVectors = sizeof(s.bits) / 16;
  for (int i = threadIdx.x; i < kBitVectors; i += kThreads)
    ptx::cp_async_16(cute::cast_smem_ptr_to_uint(&s.bits[0][0] + 4 * i),
                     masks + place.tile * kTileTokens * (HeadDim / 32) + 4 * i, 16);
  if (threadIdx.x < HeadDim / 16)
    ptx::cp_async_16(cute::cast_smem_ptr_to_uint(s.channel + 16 * threadIdx.x),
                     view.channel_order + place.head * HeadDim + 16 * threadIdx.x, 16);
  cute::cp_async_fence();
  if (!vectors) {
    for (int row = 0; row < kTileTokens; ++row)
      for (int c = threadIdx.x; order[row] < place.tokens && c < x.head_dim; c += kThreads)
        s.dense[row][swizzled(row, c)] = from[order[row] * x.stride_token + c];
    cute::cp_async_fence();
    return;
  }
  unsigned tokens = column * kVectorValues < x.head_dim ? place.tokens : 0;  // that this column has
  unsigned stride = static_cast<unsigned>(x.stride_token * sizeof(uint16_t));
  auto const* source = reinterpret_cast<uint8_t const*>(from + column * kVectorValues);
  uint32_t target = cute::cast_smem_ptr_to_uint(s.dense[first_row]);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    int column_at = swizzled(first_row + i * kRowStep, column * kVectorValues);
    ptx::cp_async_16(target + (i * kRowStep * HeadDim + column_at) * sizeof(uint16_t),
                     source + uint64_t{token[i]} * stride, token[i] < tokens ? 16 : 0);
  }
  cute::cp_async_fence();
}

// What a warp does, a lane's part of it: elements [first, first + kElements) of the tile's order.
template <Role kRole, int HeadDim>
struct LanePart {
  static constexpr int kElements = lane_elements(HeadDim) / warps_of(HeadDim);
  static constexpr int kWords = kElements / kWordElements;
  static_assert((kElements & (kElements - 1)) == 0, "first and offset must share no bits");

  int token, channel;  // positions of its first element
  uint32_t words[kWords];

  // Positions relative to the first element's; all positions are powers of two added up.
  static constexpr int offset(int element) { return decltype(element_layout<kRole, HeadDim>()){}(0, element); }
  static constexpr int token_offset(int element) { return offset(element) / HeadDim; }
  static constexpr int channel_offset(int element) { return offset(element) % HeadDim; }

  __device__ LanePart(int lane, int warp) {
    int first = decltype(element_layout<kRole, HeadDim>()){}(lane, warp * kElements);
    token = first / HeadDim;
    channel = first % HeadDim;
  }

  // The bitmap words, from rows of bits. Indices are known when loops are unrolled: what is not used is never loaded.
  __device__ void build_words(PackStorage<HeadDim> const& s) {
    uint32_t row[kTileTokens][HeadDim / 32];
#pragma unroll
    for (int e = 0; e < kElements; ++e)
      row[token_offset(e)][channel_offset(e) / 32] =
          s.bits[token + token_offset(e)][channel / 32 + channel_offset(e) / 32] >> channel % 32;
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = 0;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      int from = channel_offset(e) % 32, to = bitmap_bit(e);
      uint32_t bits = row[token_offset(e)][channel_offset(e) / 32];
      words[bitmap_word(e)] |= (from > to ? bits >> (from - to) : bits << (to - from)) & 1u << to;
    }
  }

  // Lengths of its parts of the streams, 16 bits each.
  __device__ uint32_t lengths() const {
    uint32_t length = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w)
#pragma unroll
      for (int j = 0; j < kStreams; ++j) length += __popc(words[w] & stream_bits(j)) << 16 * j;
    return length;
  }

  // Copies its values to the staged rows, those of each stream from its rank on.
  __device__ void stage_values(PackStorage<HeadDim>& s, int lane, uint32_t ranks) {
    uint32_t place[kStreams], row = cute::cast_smem_ptr_to_uint(s.dense[token]);
    uint32_t source[HeadDim][kSwizzledRows];  // of a channel, for rows of one residue
#pragma unroll
    for (int j = 0; j < kStreams; ++j) place[j] = cute::cast_smem_ptr_to_uint(&s.values[rank(ranks, j)][lane][j]);
#pragma unroll
    for (int e = 0; e < kElements; ++e)
      source[channel_offset(e)][token_offset(e) % kSwizzledRows] =
          row + 2 * swizzled(token + token_offset(e), s.channel[channel + channel_offset(e)]);
#pragma unroll
    for (int w = 0; w < kWords; ++w) ptx::forget(words[w]);
    uint32_t value[kBatch] = {};
#pragma unroll
    for (int e0 = 0; e0 < kElements; e0 += kBatch) {
#pragma unroll
      for (int e = e0; e < e0 + kBatch; ++e)
        ptx::load_shared_u16_if(value[e - e0],
                                source[channel_offset(e)][token_offset(e) % kSwizzledRows] +
                                    token_offset(e) * HeadDim * 2,
                                words[bitmap_word(e)], 1u << bitmap_bit(e));
#pragma unroll
      for (int e = e0; e < e0 + kBatch; ++e)
        ptx::append_shared_u16_if(place[Codec16::stream(e)], value[e - e0], kRowBytes, words[bitmap_word(e)],
                                  1u << bitmap_bit(e));
    }
  }

  // The same for blocks that are longer than what can be staged: only the values of rows [first_row, first_row + rows).
  __device__ void stage_window(PackStorage<HeadDim>& s, TilePlace const& place, int lane, int warp, uint32_t ranks,
                               int first_row, int rows) {
    int row[kStreams];
    for (int j = 0; j < kStreams; ++j) row[j] = rank(ranks, j) - first_row;
#pragma unroll 1
    for (int e = warp * kElements; e < (warp + 1) * kElements; ++e) {
      if (!(place.block[bitmap_word(e) * kLanes + lane] >> bitmap_bit(e) & 1)) continue;
      int position = decltype(element_layout<kRole, HeadDim>()){}(lane, e), j = Codec16::stream(e);
      int row_of = position / HeadDim, channel_of = s.channel[position % HeadDim];
      uint16_t value = s.dense[row_of][swizzled(row_of, channel_of)];
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {  // no index that is known only at run time
        if (i != j) continue;
        if (row[i] >= 0 && row[i] < rows) s.values[row[i]][lane][i] = value;
        ++row[i];
      }
    }
  }

  __device__ static int rank(uint32_t ranks, int stream) { return ranks >> 16 * stream & 0xffff; }
};

template <Role kRole, int HeadDim>
__global__ void __launch_bounds__(32 * warps_of(HeadDim))
    pack_kernel(DenseView x, bool vectors, uint32_t const* masks, int64_t const* totals, int64_t capacity,
                SparseView view, int staged_rows) {
  extern __shared__ __align__(16) uint8_t shared[];
  auto& s = *reinterpret_cast<PackStorage<HeadDim>*>(shared);
  constexpr int kThreads = 32 * warps_of(HeadDim), kRowVectors = kRowBytes / 16;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (*totals > capacity) return;
  TilePlace place(view);
  load_tile(s, x, masks, view, place, vectors);
  cute::cp_async_wait<1>();
  __syncthreads();

  LanePart<kRole, HeadDim> part(lane, warp);
  part.build_words(s);
#pragma unroll
  for (int w = 0; w < part.kWords; ++w) place.block[(warp * part.kWords + w) * kLanes + lane] = part.words[w];
  s.lengths[warp][lane] = part.lengths();
  int value_rows = place.rows - bitmap_rows(HeadDim);
  auto* staged = reinterpret_cast<uint4*>(s.values);
  auto zero_staged = [&](int rows) {
    for (int i = threadIdx.x; i < rows * kRowVectors; i += kThreads) staged[i] = make_uint4(0, 0, 0, 0);
  };
  zero_staged(min(value_rows, staged_rows));
  cute::cp_async_wait<0>();
  __syncthreads();

  uint32_t ranks = 0;
#pragma unroll
  for (int w = 0; w < warps_of(HeadDim) - 1; ++w)
    if (w < warp) ranks += s.lengths[w][lane];
  auto* to = reinterpret_cast<uint4*>(place.block + bitmap_rows(HeadDim) * kLanes);
  auto write_staged = [&](int rows) {
    __syncthreads();
    for (int i = threadIdx.x; i < rows * kRowVectors; i += kThreads) to[i] = staged[i];
    to += rows * kRowVectors;
  };
  if (value_rows <= staged_rows) {
    part.stage_values(s, lane, ranks);
    write_staged(value_rows);
    return;
  }
  for (int first_row = 0; first_row < value_rows; first_row += staged_rows) {
    int rows = min(value_rows - first_row, staged_rows);
    part.stage_window(s, place, lane, warp, ranks, first_row, rows);
    write_staged(rows);
    __syncthreads();
    zero_staged(staged_rows);
    __syncthreads();
  }
}

}  // namespace

void pack(DenseView const& x, uint32_t const* masks, int keep, int64_t const* totals, int64_t capacity,
          SparseView const& view, cudaStream_t stream) {
  visit_shape(view, [&](auto role, auto head_dim) {
    // Streams are about `keep` long: room for most tiles' values, or for those of any tile.
    int staged_rows = keep > 0 && 2 * keep <= head_dim() ? head_dim() / 8 * 5 : head_dim();
    launch_tiles(pack_kernel<role(), head_dim()>, view, 32 * warps_of(head_dim()),
                 sizeof(PackStorage<head_dim()>) + staged_rows * kRowBytes, stream, "launch of pack", x,
                 x.has_vectors(), masks, totals, capacity, view, staged_rows);
  });
}

}  // namespace cute_kernels::compress
