// Packs a tile. The dense tile arrives in shared memory with its rows in position order. A warp then takes a run of
// every lane's elements: it builds their bitmap words from the rows of bits that `balance` wrote, and copies the values
// that are present, in order, to the next rows of their streams. Which element is which is known at compile time, from
// element_layout; what differs from lane to lane is only where a row and a channel begin.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/pointer.hpp>

#include "cute_kernels/common/ptx.hpp"
#include "cute_kernels/common/ptx_bytes.hpp"
#include "cute_kernels/compress/load_tile.hpp"
#include "cute_kernels/pipeline/named_barriers.hpp"

namespace cute_kernels::compress {

using namespace format;

inline constexpr int kBatch = 4;  // values that are loaded from the dense tile before they are stored

// A lane's part of a warp's work: elements [first, first + kElements) of the tile's order. Codec: Fp16Codec for all of 16
// bits. kParts: as many are a tile.
template <Role kRole, int HeadDim, class Codec_, bool kCodes = false, int kParts = warps_of(HeadDim)>
struct LanePart {
  using Codec = Codec_;
  using Storage = PackStorage<HeadDim, Codec::kHasScales, kCodes>;
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kElements = TileFormat::lane_elements(HeadDim) / kParts;
  static constexpr int kWords = kElements / TileFormat::kWordElements;
  static_assert((kElements & (kElements - 1)) == 0, "first and offset must share no bits");

  int token, channel;  // positions of its first element
  uint32_t words[kWords];

  __device__ static int position(int lane, int element) {
    return decltype(TileFormat::element_layout<kRole, HeadDim>()){}(lane, element);
  }

  // Positions relative to the first element's; all positions are powers of two added up.
  static constexpr int offset(int element) {
    return decltype(TileFormat::element_layout<kRole, HeadDim>()){}(0, element);
  }
  static constexpr int token_offset(int element) { return offset(element) / HeadDim; }
  static constexpr int channel_offset(int element) { return offset(element) % HeadDim; }

  __device__ LanePart(int lane, int part) {
    int first = position(lane, part * kElements);
    token = first / HeadDim;
    channel = first % HeadDim;
  }

  __device__ static constexpr int bit(int element) { return TileFormat::bitmap_bit<Codec::kBitDistance>(element); }

  // The bitmap words, from rows of bits. Indices are known when loops are unrolled: what is not used is never loaded.
  __device__ void build_words(Storage const& s) {
    uint32_t row[kTileTokens][HeadDim / 32];
#pragma unroll
    for (int e = 0; e < kElements; ++e)
      row[token_offset(e)][channel_offset(e) / 32] =
          s.bits[token + token_offset(e)][channel / 32 + channel_offset(e) / 32] >> channel % 32;
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = 0;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      int from = channel_offset(e) % 32, to = bit(e);
      uint32_t bits = row[token_offset(e)][channel_offset(e) / 32];
      words[TileFormat::bitmap_word(e)] |= (from > to ? bits >> (from - to) : bits << (to - from)) & 1u << to;
    }
  }

  // Lengths of its parts of the streams, 16 bits each.
  __device__ uint32_t lengths() const {
    uint32_t length = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w)
#pragma unroll
      for (int j = 0; j < kStreams; ++j) length += __popc(words[w] & TileFormat::stream_bits(j)) << 16 * j;
    return length;
  }

  // Copies its values, or codes of 16 bits, to the staged rows, those of each stream from its rank on.
  __device__ void stage_values(Storage& s, int lane, uint32_t ranks) {
    constexpr int kBytes = sizeof(typename Storage::Element);
    uint32_t target[kStreams], row = cute::cast_smem_ptr_to_uint(s.dense[token]);
    uint32_t source[HeadDim][kSwizzledRows];  // of a channel, for rows of one residue
#pragma unroll
    for (int j = 0; j < kStreams; ++j) target[j] = cute::cast_smem_ptr_to_uint(&s.values[rank(ranks, j)][lane][j]);
#pragma unroll
    for (int e = 0; e < kElements; ++e)
      source[channel_offset(e)][token_offset(e) % kSwizzledRows] =
          row + kBytes * swizzled(token + token_offset(e), s.channel[channel + channel_offset(e)]);
#pragma unroll
    for (int w = 0; w < kWords; ++w) ptx::forget(words[w]);
    uint32_t value[kBatch] = {};
#pragma unroll
    for (int e0 = 0; e0 < kElements; e0 += kBatch) {
#pragma unroll
      for (int e = e0; e < e0 + kBatch; ++e) {
        uint32_t from = source[channel_offset(e)][token_offset(e) % kSwizzledRows] + token_offset(e) * HeadDim * kBytes;
        if constexpr (kCodes)
          ptx::load_shared_u8_if(value[e - e0], from, words[TileFormat::bitmap_word(e)], 1u << bit(e));
        else
          ptx::load_shared_u16_if(value[e - e0], from, words[TileFormat::bitmap_word(e)], 1u << bit(e));
      }
#pragma unroll
      for (int e = e0; e < e0 + kBatch; ++e)
        ptx::append_shared_u16_if(target[TileFormat::stream(e)], value[e - e0], kRowBytes,
                                  words[TileFormat::bitmap_word(e)], 1u << bit(e));
    }
  }

  // A value in the staged rows, which are zeros where there is none yet. first_row: the value row that they begin with.
  __device__ static void place(Storage& s, int lane, int stream, int rank, int first_row, uint32_t value) {
    auto& word = reinterpret_cast<uint32_t (*)[kLanes]>(s.values)[Codec::value_row(stream, rank) - first_row][lane];
    if constexpr (Codec::kValueBits == 4)
      atomicOr(&word, Codec::place(value, stream, rank));  // another warp may have its neighbour
    else if constexpr (Codec::kValueBits == 8)
      reinterpret_cast<uint8_t*>(&word)[rank % Codec::kWordValues] = static_cast<uint8_t>(value);
    else
      reinterpret_cast<uint16_t*>(&word)[stream] = static_cast<uint16_t>(value);
  }

  // For blocks that are longer than what can be staged: only the values of rows [first_row, first_row + rows).
  __device__ void stage_rows(Storage& s, uint32_t const* block, int lane, int warp, uint32_t ranks, int first_row,
                             int rows) {
    int taken[kStreams];
    for (int j = 0; j < kStreams; ++j) taken[j] = rank(ranks, j);
#pragma unroll 1
    for (int e = warp * kElements; e < (warp + 1) * kElements; ++e) {
      if (!(block[TileFormat::bitmap_word(e) * kLanes + lane] >> bit(e) & 1)) continue;
      int at = position(lane, e), j = TileFormat::stream(e);
      int row_of = at / HeadDim, channel_of = s.channel[at % HeadDim];
      uint16_t value = s.dense[row_of][swizzled(row_of, channel_of)];
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {  // no index that is known only at run time
        if (i != j) continue;
        int row = Codec::value_row(i, taken[i]) - first_row;
        if (row >= 0 && row < rows) place(s, lane, i, taken[i], first_row, value);
        ++taken[i];
      }
    }
  }

  __device__ static int rank(uint32_t ranks, int stream) { return ranks >> 16 * stream & 0xffff; }
};

// A LanePart whose words are worked on by the same code, one after the other: for a kernel that packs one tile, whose
// time is that of fetching the code.
template <Role kRole, int HeadDim>
struct RolledLanePart : LanePart<kRole, HeadDim, Fp16Codec> {
  using Base = LanePart<kRole, HeadDim, Fp16Codec>;
  using Storage = typename Base::Storage;
  using Word = LanePart<kRole, HeadDim, Fp16Codec, false, TileFormat::bitmap_rows(HeadDim)>;
  static_assert(Word::kWords == 1);
  int first_word;

  __device__ RolledLanePart(int lane, int warp) : Base(lane, warp), first_word(warp * Base::kWords) {}

  // The words take turns in the first place, so that no index is known only at run time.
  __device__ void turn(uint32_t word) {
#pragma unroll
    for (int w = 1; w < Base::kWords; ++w) this->words[w - 1] = this->words[w];
    this->words[Base::kWords - 1] = word;
  }

  __device__ void build_words(Storage const& s) {
#pragma unroll 1
    for (int w = 0; w < Base::kWords; ++w) {
      Word word(threadIdx.x % 32, first_word + w);
      word.build_words(s);
      turn(word.words[0]);
    }
  }

  __device__ void stage_values(Storage& s, int lane, uint32_t ranks) {
#pragma unroll 1
    for (int w = 0; w < Base::kWords; ++w) {
      Word word(lane, first_word + w);
      word.words[0] = this->words[0];
      turn(word.words[0]);
      word.stage_values(s, lane, ranks);
      ranks += word.lengths();
    }
  }
};

// Threads that pack a tile together.
struct WholeCta {
  __device__ void sync() const { __syncthreads(); }
};
template <int Threads>
struct PartOfCta {
  int index;  // of two
  __device__ void sync() const { index ? pipeline::sync_worker(1, Threads) : pipeline::sync_worker(0, Threads); }
};

// Nothing is to be cut off a block.
struct NoTrim {
  template <class Part, class Group>
  __device__ void operator()(typename Part::Storage&, Part&, Group const&) const {}
};

// Writes the bitmap of a tile whose bits have arrived. trim(s, part, group) may take bits off the words.
template <class Part, class Trim, class Group>
__device__ void write_bitmap(Part& part, typename Part::Storage& s, uint32_t* block, Trim const& trim,
                             Group const& group) {
  constexpr int kThreads = 32 * Part::Storage::kWarps;
  int thread = threadIdx.x % kThreads, lane = thread % 32, warp = thread / 32;
  trim(s, part, group);
#pragma unroll
  for (int w = 0; w < part.kWords; ++w) block[(warp * part.kWords + w) * kLanes + lane] = part.words[w];
  s.lengths[warp][lane] = part.lengths();
}

template <class Storage>
__device__ void clear_staged(Storage& s, int rows) {
  auto* staged = reinterpret_cast<uint4*>(s.values);
  constexpr int kThreads = 32 * Storage::kWarps;
  for (int i = threadIdx.x % kThreads; i < rows * kRowBytes / 16; i += kThreads) staged[i] = make_uint4(0, 0, 0, 0);
}

// Loads a tile, writes its bitmap and, with scales, those of its tokens, and makes zeros of staged rows.
template <class Part, class Trim, class Group>
__device__ void begin_tile(Part& part, typename Part::Storage& s, TileSource const& x, uint32_t* block,
                           int rows_to_stage, Trim const& trim, Group const& group) {
  load_tile(s, x);
  cute::cp_async_wait<1>();
  group.sync();

  part.build_words(s);
  if constexpr (Part::Codec::kHasScales) load_scales(s, x, s.channel, block);
  write_bitmap(part, s, block, trim, group);
  clear_staged(s, rows_to_stage);
  cute::cp_async_wait<0>();
  group.sync();
}

// The same with a dense tile of codes, which are made of what global memory has.
template <class Part, class Group>
__device__ void begin_tile_of_codes(Part& part, typename Part::Storage& s, TileSource const& x, uint32_t* block,
                                    int rows_to_stage, Group const& group) {
  load_bits(s, x);
  cute::cp_async_fence();
  using Codec = typename Part::Codec;
  using Vectors = TileVectors<typename Part::Storage>;
  constexpr int kAll = Vectors::kVectors, kQuarter = kAll / 4;  // the last one takes the registers of the first
  Vectors vectors;
  vectors.template load<0, kAll - kQuarter>(x);
  load_scales(s, x, x.channel_order, block);
  clear_staged(s, rows_to_stage);
  cute::cp_async_wait<0>();
  group.sync();
  part.build_words(s);
  write_bitmap(part, s, block, NoTrim{}, group);
  vectors.template encode<Codec, 0, kQuarter>(s, x.dtype);
  vectors.template load<kAll - kQuarter, kAll>(x);
  vectors.template encode<Codec, kQuarter, kAll>(s, x.dtype);
  group.sync();
}

// Where a lane's values begin in its streams, 16 bits each.
template <class Storage>
__device__ uint32_t first_ranks(Storage const& s, int lane, int warp) {
  uint32_t ranks = 0;
#pragma unroll
  for (int w = 0; w < Storage::kWarps - 1; ++w)
    if (w < warp) ranks += s.lengths[w][lane];
  return ranks;
}

// The values of a tile by way of staged rows, as often as these are filled.
template <class Part, class Group>
__device__ void write_rows(Part& part, typename Part::Storage& s, uint32_t* block, int value_rows, int staged_rows,
                           Group const& group) {
  constexpr int HeadDim = Part::kHeadDim, kThreads = 32 * Part::Storage::kWarps, kRowVectors = kRowBytes / 16;
  int thread = threadIdx.x % kThreads, lane = thread % 32, warp = thread / 32;
  auto* staged = reinterpret_cast<uint4*>(s.values);
  auto* to = reinterpret_cast<uint4*>(block + TileFormat::first_value_row<typename Part::Codec>(HeadDim) * kLanes);
  uint32_t ranks = first_ranks(s, lane, warp);
#pragma unroll 1
  for (int first_row = 0; first_row < value_rows; first_row += staged_rows) {
    int rows = min(value_rows - first_row, staged_rows);
    part.stage_rows(s, block, lane, warp, ranks, first_row, rows);
    group.sync();
#pragma unroll 1
    for (int i = thread; i < rows * kRowVectors; i += kThreads) {
      to[first_row * kRowVectors + i] = staged[i];
      staged[i] = make_uint4(0, 0, 0, 0);
    }
    group.sync();
  }
}

// Codes of 16 bits in staged rows to words of the codec.
template <class Codec, int kThreads>
__device__ void copy_codes(uint16_t const (*staged)[kLanes][kStreams], uint32_t* to, int value_rows) {
  static_assert(kStreams == 2 && Codec::kWordRows == 2);
  auto const* pairs = reinterpret_cast<uint32_t const*>(staged);  // of a lane: a code of either stream
#pragma unroll 2
  for (int i = threadIdx.x % kThreads; i < value_rows / 2 * kLanes; i += kThreads) {
    int words = i / kLanes, lane = i % kLanes;
    uint32_t pair[Codec::kWordValues];
#pragma unroll
    for (int v = 0; v < Codec::kWordValues; ++v) pair[v] = pairs[(words * Codec::kWordValues + v) * kLanes + lane];
    if constexpr (Codec::kValueBits == 4) {
#pragma unroll
      for (int v = 0; v < 4; ++v) pair[v] = pair[2 * v] | pair[2 * v + 1] << 4;
    }
    uint32_t first = ptx::permute_bytes(pair[0], pair[1], 0x6240),
             second = ptx::permute_bytes(pair[2], pair[3], 0x6240);
    to[2 * words * kLanes + lane] = ptx::permute_bytes(first, second, 0x5410);
    to[(2 * words + 1) * kLanes + lane] = ptx::permute_bytes(first, second, 0x7632);
  }
}

// Packs a tile into `value_rows` rows below those of its bitmap and scales. kCodes: see PackStorage; nothing is trimmed
// then.
template <Role kRole, int HeadDim, class Codec = Fp16Codec, bool kCodes = false,
          class Part = LanePart<kRole, HeadDim, Codec, kCodes>, class Trim, class Group>
__device__ void pack_tile(PackStorage<HeadDim, Codec::kHasScales, kCodes>& s, TileSource const& x, uint32_t* block,
                          int value_rows, int staged_rows, Trim const& trim, Group const& group) {
  constexpr int kThreads = 32 * warps_of(HeadDim), kRowVectors = kRowBytes / 16;
  int thread = threadIdx.x % kThreads, lane = thread % 32, warp = thread / 32;
  Part part(lane, warp);
  int rows_to_stage = Codec::most_values(value_rows);  // a code takes 16 bits there, too
  if constexpr (kCodes) {
    begin_tile_of_codes(part, s, x, block, min(rows_to_stage, staged_rows), group);
  } else {
    begin_tile(part, s, x, block, min(rows_to_stage, staged_rows), trim, group);
    if constexpr (Codec::kHasScales) {
      encode_tile<Codec>(s, x.dtype);
      group.sync();
    }
  }
  constexpr bool kStages = HeadDim < kMaxHeadDim || !Codec::kHasScales;  // else registers do not suffice
  if (!kStages || rows_to_stage > staged_rows) return write_rows(part, s, block, value_rows, staged_rows, group);
  part.stage_values(s, lane, first_ranks(s, lane, warp));
  group.sync();
  uint32_t* to = block + TileFormat::first_value_row<Codec>(HeadDim) * kLanes;
  if constexpr (Codec::kIsNarrow) return copy_codes<Codec, kThreads>(s.values, to, value_rows);
  auto* staged = reinterpret_cast<uint4*>(s.values);
  for (int i = thread; i < value_rows * kRowVectors; i += kThreads) reinterpret_cast<uint4*>(to)[i] = staged[i];
}

// The same in any narrow codec, which is known when the kernel runs: little code that takes more time.
template <Role kRole, int HeadDim, class Trim, class Group>
__device__ void pack_narrow_tile(PackStorage<HeadDim, true>& s, TileSource const& x, CodecId codec, uint32_t* block,
                                 int value_rows, int staged_rows, Trim const& trim, Group const& group) {
  int thread = threadIdx.x % (32 * warps_of(HeadDim)), lane = thread % 32, warp = thread / 32;
  LanePart<kRole, HeadDim, Fp8Codec> part(lane, warp);  // bitmaps do not depend on the codec
  begin_tile(part, s, x, block, min(value_rows, staged_rows), trim, group);
  auto write = [&](auto narrow) {
    using Codec = decltype(narrow);
    static_assert(Codec::kBitDistance == Fp8Codec::kBitDistance);
    encode_tile<Codec>(s, x.dtype);
    group.sync();
    LanePart<kRole, HeadDim, Codec> of_codec(lane, warp);
    write_rows(of_codec, s, block, value_rows, staged_rows, group);
  };
  if (codec == CodecId::kFp8)
    write(Fp8Codec{});
  else if (codec == CodecId::kInt8)
    write(Int8Codec{});
  else
    write(Int4Codec{});
}

// Rows of values that a CTA stages. Streams are about `keep` long: enough for most tiles, or for any tile.
constexpr int staged_rows(int padded_head_dim, int keep) {
  return keep > 0 && 2 * keep <= padded_head_dim ? padded_head_dim / 8 * 5 : padded_head_dim;
}

}  // namespace cute_kernels::compress
