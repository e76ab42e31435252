// Query tokens of the rows of a batch that differ in number: those of a row lie behind those of the row before.
#pragma once

#include <cute/config.hpp>

#include <cstdint>

namespace cute_kernels::schedule {

struct QueryTokens {
  int first, count;
};

struct PackedQueries {
  int32_t const* starts;  // (batch + 1): where the tokens of every row begin, then where the last ones end; null: all
                          // rows have as many, each a place of its own
  int tokens;             // of all rows

  // Of a row, at most `most`. Whatever the numbers are, it stays within the tokens.
  CUTE_HOST_DEVICE QueryTokens of_row(int row, int most) const {
    int begin = clamp(starts[row], 0, tokens), end = clamp(starts[row + 1], begin, tokens);
    return {begin, end - begin < most ? end - begin : most};
  }

  // Where kernels that count `most` tokens for every row, so that the last ones of all rows have one number, find a
  // token; one that the row does not have is ahead of its first.
  CUTE_HOST_DEVICE static int position(QueryTokens const& row, int token, int most) {
    return row.first + row.count - most + token;
  }

 private:
  CUTE_HOST_DEVICE static int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }
};

}  // namespace cute_kernels::schedule
