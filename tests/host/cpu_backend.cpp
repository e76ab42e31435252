// link: cute_kernels/cpu/layout.cpp
// What the CPU kernels assume about the format, their conversions against CUTLASS's, and their softmax.
#include <cmath>
#include <random>

#include "check.hpp"
#include "cute_kernels/cpu/attention_kernels.hpp"
#include "cute_kernels/cpu/half.hpp"
#include "cute_kernels/cpu/kernels.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/cpu/simd_scalar.hpp"
#include "cute_kernels/cpu/tile_shape.hpp"

using namespace cute_kernels;
using namespace cute_kernels::cpu;

// product_layout throws where element_layout has another structure.
void check_structure() {
  static_assert(kTileLanes == format::kLanes && kTileRows == kLaneRows && kTileColumns == kLaneColumns);
  static_assert(kTileStreams == kStreams && kTokensOfTile == format::kTileTokens);
  static_assert(kMaskEntries * kStreams == TileFormat::kWordElements);
  for (auto role : {format::Role::kKey, format::Role::kValue})
    for (int head_dim = format::kMinHeadDim; head_dim <= format::kMaxHeadDim; head_dim *= 2) {
      ProductLayout const& layout = product_layout(role, head_dim);
      bool const is_key = role == format::Role::kKey;
      check(layout.blocks == (is_key ? kTileBlocks : head_dim / 16), "blocks of 16 rows of A", head_dim);
      check(layout.entries == (is_key ? head_dim / 4 : kMaskEntries), "entries of a stream in a block", head_dim);
      check(layout.entries % kMaskEntries == 0, "whole bitmap words", head_dim);
    }
  bool threw = false;
  try {
    product_layout(format::Role::kKey, 96);
  } catch (std::invalid_argument const&) {
    threw = true;
  }
  check(threw, "no layout for 96 channels");
  for (int e = 0; e < TileFormat::kWordElements; ++e) {
    int entry = e / kStreams, stream = TileFormat::stream(e);
    uint32_t const shuffled = 1u << (kMaskEntries * stream + entry);
    check(shuffle_bits(1u << TileFormat::bitmap_bit(e)) == shuffled, "shuffle_bits", e);
    check(shuffle_narrow_bits(1u << TileFormat::bitmap_bit<4>(e)) == shuffled, "shuffle_narrow_bits", e);
  }
  bool seen[kPairBlock] = {};
  for (int index = 0; index < kPairBlock; ++index) {
    check(!seen[pair_entry(index)], "pair_entry is one to one", index);
    check(pair_entry(index) % 4 == index % 4, "indices keep the order within 4 entries", index);
    check(pair_entry(index) / kMaskEntries == index % 16 / kSumWidth, "8 pairs of a vector hold one word", index);
    if (index % 16 < 8)
      check(pair_entry(index + 8) == pair_entry(index) + kMaskEntries, "both words take the same order", index);
    seen[pair_entry(index)] = true;
  }
}

// NaNs need not be the same NaN.
bool same(float a, float b) { return std::isnan(a) ? std::isnan(b) : bits_of_float(a) == bits_of_float(b); }

void check_widening() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    auto b = static_cast<uint16_t>(bits);
    float half = static_cast<float>(cute::half_t::bitcast(b)),
          bfloat = static_cast<float>(cute::bfloat16_t::bitcast(b));
    check(same(half_to_float(b), half), "half_to_float", bits);
    check(same(bfloat16_to_float(b), bfloat), "bfloat16_to_float", bits);
    if (std::isnan(half) || std::isnan(bfloat)) continue;
    check(float_to_half(half) == b, "there and back by float_to_half", bits);
    check(float_to_bfloat16(bfloat) == b, "there and back by float_to_bfloat16", bits);
  }
}

// To the nearest of the two neighbours, ties to the even one, checked in double precision.
template <class Widen, class Narrow>
void check_narrowing(float x, Widen widen, Narrow narrow, double beyond, char const* what) {
  uint16_t got = narrow(x);
  if (std::isnan(x)) {
    check(std::isnan(widen(got)), what, bits_of_float(x));
    return;
  }
  auto value = [&](uint16_t magnitude) {  // infinity rounds as if it were the next number
    double v = widen(magnitude);
    return std::isinf(v) ? beyond : v;
  };
  uint16_t magnitude = got & 0x7fff;
  double exact = std::fmin(std::fabs(x), beyond), error = std::fabs(value(magnitude) - exact);
  bool good = (got >> 15) == (bits_of_float(x) >> 31);
  for (int step : {-1, 1}) {
    int neighbour = magnitude + step;
    if (neighbour < 0 || std::isnan(widen(static_cast<uint16_t>(neighbour)))) continue;
    double other = std::fabs(value(static_cast<uint16_t>(neighbour)) - exact);
    good = good && (error < other || (error == other && magnitude % 2 == 0));
  }
  check(good, what, bits_of_float(x));
}

void check_narrowing() {
  std::mt19937 random(1);
  auto check_both = [](float x) {
    check_narrowing(x, half_to_float, float_to_half, 0x1p16, "float_to_half");
    check_narrowing(x, bfloat16_to_float, float_to_bfloat16, 0x1p128, "float_to_bfloat16");
  };
  for (int i = 0; i < 200000; ++i) check_both(float_of_bits(static_cast<uint32_t>(random())));
  for (uint32_t bits = 0; bits < 0x10000; ++bits)  // halves, and the points half way to the next, and their neighbours
    for (int offset : {-1, 0, 1}) {
      auto half = static_cast<uint16_t>(bits);
      if (std::isfinite(half_to_float(half))) {
        uint32_t magnitude = bits_of_float(half_to_float(half));
        check_both(float_of_bits(magnitude + 0x1000 + static_cast<uint32_t>(offset)));
        check_both(half_to_float(half) + std::copysign(0x1p-25f, half_to_float(half)));
      }
      check_both(float_of_bits((bits << 16) + 0x8000 + static_cast<uint32_t>(offset)));
    }
}

void check_exp() {
  for (float x = -86.9f; x <= 0; x += 0.000131f) {
    double exact = std::exp(static_cast<double>(x));
    check(std::fabs(exp_of_negative(x) - exact) <= 3e-7 * exact, "exp_of_negative", bits_of_float(x));
  }
  check(exp_of_negative(0.f) == 1.f && exp_of_negative(-0.f) == 1.f, "exp of 0");
  for (float x : {-87.1f, -1e30f, -kInfinity}) check(exp_of_negative(x) == 0.f, "exp of very little");
  check(std::isnan(exp_of_negative(NAN)), "exp of NaN");
}

// Tiles one after the other, the first of them hidden.
void check_softmax() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (float spread : {0.f, 1.f, 30.f, 1000.f}) {
    RunningSoftmax running{-kInfinity, 0.f};
    double max = -INFINITY, earlier = 0;  // what was added so far, relative to `max`
    for (int visible : {0, 1, 64, 0, 63, 17, 64}) {
      float logits[kTokensOfTile];
      double exact[kTokensOfTile], tile_max = max;
      for (int i = 0; i < kTokensOfTile; ++i) exact[i] = logits[i] = i < visible ? spread * normal(random) : NAN;
      for (int i = 0; i < visible; ++i) tile_max = std::fmax(tile_max, exact[i]);
      double const factor = softmax<Scalar>(logits, visible, &running);
      check(running.row_max == tile_max, "the largest logit");
      if (std::isinf(max))
        check(earlier == 0, "nothing to scale");
      else
        check(std::fabs(factor - std::exp(max - tile_max)) <= 1e-6, "factor of earlier sums");
      earlier = std::isinf(max) ? 0 : earlier * std::exp(max - tile_max);
      max = tile_max;
      for (int i = 0; i < kTokensOfTile; ++i) {
        float const below = static_cast<float>(exact[i]) - static_cast<float>(max);  // rounded, as it may be
        double const weight = i < visible ? std::exp(static_cast<double>(below)) : 0;
        check(std::fabs(logits[i] - weight) <= 3e-7 * weight + 2e-38, "weight", i, visible);
        earlier += weight;
      }
      check(std::fabs(running.row_sum - earlier) <= 1e-5 * earlier, "sum of weights", visible);
    }
  }
  float logits[kTokensOfTile];
  for (float& logit : logits) logit = NAN;
  RunningSoftmax running{-kInfinity, 0.f};
  softmax<Scalar>(logits, 64, &running);
  check(std::isnan(running.row_sum) && std::isnan(logits[5]), "NaN that is seen");
}

int main() {
  check_structure();
  check_widening();
  check_narrowing();
  check_exp();
  check_softmax();
  return report();
}
