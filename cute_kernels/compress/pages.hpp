// Compression into a pool of pages on the GPU. The same results, bit for bit, as the CPU backend (cpu/pages.cpp).
// Nothing here synchronises or allocates.
#pragma once

#include "cute_kernels/compress/compress.hpp"
#include "cute_kernels/compress/pool.hpp"

namespace cute_kernels::compress {

// Compresses k and v, whole tiles of tokens, straight into the pool's slots. `part`: tiles of every head that are
// worked on together, which bounds the scratch; selection is done twice where that is not all of them and channels are
// dealt.
void store(Pool const& pool, DenseView const& k, DenseView const& v, PoolRows const& rows, NewOrder order, int64_t part,
           void* scratch, cudaStream_t stream);
int64_t store_scratch_bytes(Pool const& pool, int batch, int64_t part);

// The newest tokens of every sequence: contiguous (sequences, kv_heads, capacity, head_dim).
struct Windows {
  uint16_t* keys;
  uint16_t* values;
  int32_t* lengths;      // (sequences)
  int32_t* arrivals;     // (sequences): zeros; scratch of `append`
  int capacity, recent;  // tokens: at most, at least
  bool stores_full;      // a tile is stored when its 64th token arrives, not when it leaves the window
  // Where `append` prepares a tile in the calls before the one that stores it; null: nowhere. Not where stores_full.
  // It holds for the window's first 64 tokens and the orders of channels: who changes these sets `prepared` to 0.
  int32_t* prepared = nullptr;     // (sequences): portions that are done of the tile that the window begins with
  uint8_t* preparation = nullptr;  // (sequences, kv_heads, preparation_bytes): what they have found
};

// Where tiles are dealt out to ranks: tile i of a sequence belongs to rank i % ranks.
struct Share {
  int32_t* lengths = nullptr;  // (sequences): tokens in this rank's tiles; null: nobody asks
  int rank = 0, ranks = 1;
};

// k, v: new tokens, at most 64 a row; row i is sequence sequences[i], or i if that is null; a row of a negative one is
// left out. lengths (sequences): compressed tokens, those that left the window; those of `share` grow with its rank's
// tiles. One kernel, which leaves a sequence as it was and sets the pool's
// error where the new tokens do not fit into the window or the tile that is due has no page.
void append(Pool const& pool, Windows const& windows, int32_t* lengths, DenseView const& k, DenseView const& v,
            int32_t const* sequences, Share const& share, cudaStream_t stream);
// Of a sequence and KV head, in Windows::preparation.
int preparation_bytes(int padded_head_dim);

// keys, values: contiguous (kv_heads, tokens of the run, head_dim); zeros where there is no page.
void load(Pool const& pool, TileRun const& run, void* keys, void* values, cudaStream_t stream);

}  // namespace cute_kernels::compress
