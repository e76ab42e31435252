// What every tile format shares. A tile format is a policy type such as BitmapTile (bitmap.hpp): where the nonzeros of
// a tile are, and which MMA atom multiplies them. How a value is stored is up to the codec (codec/codec.hpp).
//
// A tile holds 64 cached tokens of one (batch, KV head). Keys are K (M = tokens, K = channels), values are V^T
// (M = channels, K = tokens), so one KV head multiplies its whole query group in one pass.
//
// A tile is stored as a block: rows of 32 words of 4 bytes, word l of a row belongs to lane l. A lane owns a part of
// the tile's elements; its nonzeros form value streams, which fill the value rows.
#pragma once

#include <cute/config.hpp>

namespace cute_kernels::format {

enum class Role : int { kKey = 0, kValue = 1 };
enum class TileFormatId : int { kBitmap = 0, kTwoOfFour = 1, kTwoOfFourBitmap = 2 };

inline constexpr int kTileTokens = 64;
inline constexpr int kLanes = 32;
inline constexpr int kRowBytes = 4 * kLanes;  // one 32-bit word a lane; lane l stays in bank l
inline constexpr int kStreamBits = 16;        // that a lane's stream has of a value row, on average
inline constexpr int kClasses = 8;            // token and channel position mod 8 decide the stream: token_order.hpp
inline constexpr int kMinHeadDim = 64;        // tiles hold 64, 128 or 256 channels; any other multiple of 8 is
inline constexpr int kMaxHeadDim = 256;       // padded with empty channels

// What a tile holds `head_dim` channels as, or 0 if it cannot.
CUTE_HOST_DEVICE constexpr int padded_head_dim(int head_dim) {
  if (head_dim <= 0 || head_dim > kMaxHeadDim || head_dim % 8 != 0) return 0;
  int padded = kMinHeadDim;
  while (padded < head_dim) padded *= 2;
  return padded;
}

}  // namespace cute_kernels::format
