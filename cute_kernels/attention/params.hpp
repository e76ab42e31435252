// What the attention kernels are called with.
#pragma once

#include "cute_kernels/attention/cut.hpp"
#include "cute_kernels/attention/problem.hpp"
#include "cute_kernels/matmul/params.hpp"

namespace cute_kernels::attention {

struct Params : Problem {
  float scale_log2;                        // the kernels' exponentials are powers of two
  int rows;                                // query rows of a KV head: group size x query tokens
  int group;                               // query heads of a KV head
  int workers;                             // of a CTA
  bool plain;                              // contiguous caches with one token order, row i meets sequence i, not ragged
  bool ragged;                             // units differ from sequence to sequence
  bool by_segments;                        // see work.hpp; never if ragged
  bool own_orders;                         // keys and values were not compressed together: each has its token order
  bool erases;                             // sequences may end within a tile whose further tokens are stored
  bool window_vectorized;                  // keys of the window and q may be read 16 bytes at a time
  bool window_staged;                      // and producers bring its tokens as they lie; true without a window
  int line_bytes;                          // of shared memory that the line takes
  Cut cut;                                 // of the line's places, unless ragged; of a segment's if by_segments
  int window_places;                       // of a unit of the window, see cut.hpp
  int longest;                             // units of any piece at most, unless ragged
  cutlass::FastDivmod pieces;              // of the line, or of a segment if by_segments
  cutlass::FastDivmod units_per_segment;   // unless ragged
  cutlass::FastDivmod places_per_segment;  // unless ragged
  cutlass::FastDivmod row_segments;        // of a row of q: KV heads x blocks of query rows
  cutlass::FastDivmod row_blocks, query_tokens;  // as divisors
  matmul::Stages stages;
  void* partials;  // unless by_segments: one for every piece and one for every segment, see combine.hpp
};

}  // namespace cute_kernels::attention
