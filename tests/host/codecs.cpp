// link: cute_kernels/cpu/block.cpp
// link: cute_kernels/cpu/layout.cpp
// The codecs against computations in double, value by value, and blocks of every codec against a second reader.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/cpu/tile_steps.hpp"

using namespace cute_kernels;
using namespace cute_kernels::format;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A binary floating-point number of these widths as IEEE 754 defines it, without its sign.
double ieee_magnitude(uint32_t magnitude, int exponent_bits, int mantissa_bits) {
  int const bias = (1 << (exponent_bits - 1)) - 1;
  int const exponent = static_cast<int>(magnitude >> mantissa_bits);
  double const fraction = std::ldexp(static_cast<double>(magnitude % (1u << mantissa_bits)), -mantissa_bits);
  if (exponent == (1 << exponent_bits) - 1) return fraction == 0 ? kInfinity : kNan;
  return exponent ? std::ldexp(1 + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias);
}

double value_of(uint16_t bits, DType dtype) {
  double const magnitude =
      dtype == DType::kFloat16 ? ieee_magnitude(bits & 0x7fff, 5, 10) : ieee_magnitude(bits & 0x7fff, 8, 7);
  return bits >> 15 ? -magnitude : magnitude;
}

// OCP's E4M3: no infinities, one NaN.
double e4m3_magnitude(uint32_t magnitude) {
  if (magnitude == 0x7f) return kNan;
  double const fraction = std::ldexp(static_cast<double>(magnitude % 8), -3);
  int const exponent = static_cast<int>(magnitude / 8);
  return exponent ? std::ldexp(1 + fraction, exponent - 7) : std::ldexp(fraction, -6);
}

// By trying every number that e4m3 has.
uint32_t nearest_e4m3(double magnitude) {
  uint32_t best = 0;
  double least = kInfinity;
  for (uint32_t stored = 0; stored < 0x7f; ++stored) {
    double const error = std::fabs(std::fmin(magnitude, 448) - e4m3_magnitude(stored));
    if (error < least || (error == least && stored % 2 == 0)) best = stored, least = error;
  }
  return best;
}

void check_e4m3() {
  check(e4m3_magnitude(0x7e) == 448 && e4m3_magnitude(1) == std::ldexp(1, -9), "the numbers of e4m3");
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      double const value = value_of(static_cast<uint16_t>(bits), dtype);
      uint32_t const stored = E4m3Codec::encode(static_cast<uint16_t>(bits), dtype);
      uint32_t const magnitude = std::isnan(value) ? 0x7f : nearest_e4m3(std::fabs(value));
      check(stored == (magnitude | (bits >> 15 << 7)), "e4m3 encode", dtype, bits, stored);
      check(E4m3Codec::is_zero(stored) == (magnitude == 0), "e4m3 is_zero", dtype, bits);
    }
    for (uint32_t stored = 0; stored < 0x100; ++stored) {
      uint16_t const bits = E4m3Codec::decode(stored, dtype);
      double const exact = e4m3_magnitude(stored & 0x7f), got = value_of(bits & 0x7fff, dtype);
      check(std::isnan(exact) ? std::isnan(got) : got == exact, "e4m3 decode", dtype, stored);
      check(bits >> 15 == stored >> 7, "e4m3 decode keeps the sign", dtype, stored);
      check(E4m3Codec::encode(bits, dtype) == stored, "e4m3 there and back", dtype, stored);
    }
  }
  // A tie, the last number that is not above it, and one that rounds up to the next power of two.
  static_assert(E4m3Codec::encode(0x3c40, DType::kFloat16) == 0x38, "1 + 1/16 is half way to 1 + 1/8: 1 is even");
  static_assert(E4m3Codec::encode(0x3cc0, DType::kFloat16) == 0x3a, "1 + 3/16 is half way: 1 + 2/8 is even");
  static_assert(E4m3Codec::encode(0x3fff, DType::kFloat16) == 0x40, "just below 2 is 2");
  static_assert(E4m3Codec::encode(0x7c00, DType::kFloat16) == 0x7e, "infinity is 448");
}

void check_halves() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    auto const b = static_cast<uint16_t>(bits);
    check(Fp16Codec::encode(b, DType::kFloat16) == bits && Fp16Codec::decode(bits, DType::kFloat16) == b, "fp16", bits);
    check(Bf16Codec::encode(b, DType::kBFloat16) == bits && Bf16Codec::decode(bits, DType::kBFloat16) == b, "bf16",
          bits);
    check(Fp16Codec::is_zero(bits) == (value_of(b, DType::kFloat16) == 0), "fp16 is_zero", bits);
    check(Bf16Codec::is_zero(bits) == (value_of(b, DType::kBFloat16) == 0), "bf16 is_zero", bits);
  }
}

// What the codecs have in common.
template <class Codec>
void check_codec_bits(DType dtype) {
  uint32_t const most = (1u << Codec::kValueBits) - 1;
  for (int stream = 0; stream < BitmapTile::kStreams; ++stream)
    for (int rank = 0; rank < 5; ++rank) {
      int const shift = 16 * stream + Codec::kValueBits * (rank % Codec::kValuesPerRow);
      check(Codec::place(most, stream, rank) == most << shift, "place", Codec::kId, stream, rank);
      check(Codec::extract(~(most << shift), stream, rank) == 0, "extract nothing else", Codec::kId, stream, rank);
      check(Codec::extract(most << shift, stream, rank) == most, "extract", Codec::kId, stream, rank);
      for (uint32_t stored = 0; stored <= most; ++stored) {
        bool const finite = std::isfinite(value_of(Codec::decode(stored, dtype), dtype));
        check(Codec::all_finite(Codec::place(stored, stream, rank)) == finite, "all_finite", Codec::kId, stored);
      }
    }
  for (int longest = 0; longest < 10; ++longest)
    check(
        Codec::value_rows(longest) == static_cast<int>(std::ceil(longest / static_cast<double>(Codec::kValuesPerRow))),
        "value_rows", Codec::kId, longest);
  check(codec_name(Codec::kId) == std::string(Codec::kName), "visit_codec", Codec::kId);
}

// A tile of random bits, of which about `density` are nonzero: to a block and back, and read by the rules of the
// format.
template <class Codec>
void check_block(Role role, int head_dim, DType dtype, double density, std::mt19937& random) {
  int const elements = BitmapTile::lane_elements(head_dim), bitmap_rows = BitmapTile::bitmap_rows(head_dim);
  std::vector<uint16_t> const& table = cpu::element_table(role, head_dim);
  auto position = [&](int lane, int e) { return table[lane * elements + e]; };
  std::vector<uint16_t> dense(kTileTokens * head_dim), back(dense.size(), 0xaaaa);
  std::bernoulli_distribution present(density);
  for (uint16_t& bits : dense) bits = present(random) ? static_cast<uint16_t>(random()) : static_cast<uint16_t>(0);
  dense[5] = 0x8000;  // -0

  std::vector<uint32_t> expected[kLanes][2];  // the streams
  for (int lane = 0; lane < kLanes; ++lane)
    for (int e = 0; e < elements; ++e) {
      uint32_t const stored = Codec::encode(dense[position(lane, e)], dtype);
      if (value_of(Codec::decode(stored, dtype), dtype) != 0) expected[lane][e % 2].push_back(stored);
    }
  size_t longest = 0;
  for (auto& lane : expected)
    for (auto& stream : lane) longest = std::max(longest, stream.size());

  SparseView view{};
  view.role = role;
  view.dtype = dtype;
  view.codec = Codec::kId;
  view.head_dim = view.padded_head_dim = head_dim;
  int const value_rows = Codec::value_rows(static_cast<int>(longest)), rows = bitmap_rows + value_rows;
  std::vector<uint32_t> block(rows * kLanes, ~0u);
  cpu::write_block(view, dense.data(), rows, block.data());
  cpu::read_block(view, block.data(), rows, back.data());
  bool good = true;
  for (size_t i = 0; i < dense.size(); ++i) {
    uint32_t const stored = Codec::encode(dense[i], dtype);
    good = good && back[i] == (Codec::is_zero(stored) ? 0 : Codec::decode(stored, dtype));
  }
  check(good, "a block and back", Codec::kId, head_dim, 10 * density);

  constexpr int kBytes = Codec::kValueBits / 8;
  good = true;
  for (int lane = 0; lane < kLanes; ++lane) {
    auto byte = [&](int row, int i) { return block[(bitmap_rows + row) * kLanes + lane] >> 8 * i & 0xff; };
    for (int s = 0; s < 2; ++s)
      for (int i = 0; i < 2 * value_rows; i += kBytes) {  // bytes of the stream
        size_t const rank = static_cast<size_t>(i / kBytes);
        uint32_t stored = byte(i / 2, 2 * s + i % 2);
        if (kBytes == 2) stored |= byte(i / 2, 2 * s + 1) << 8;
        good = good && stored == (rank < expected[lane][s].size() ? expected[lane][s][rank] : 0);
      }
    for (int e = 0; e < elements; ++e) {
      uint32_t const word = block[e / 32 * kLanes + lane];
      bool const bit = word >> (2 * (e / 8 % 4) + e % 2 + 8 * (e / 2 % 4)) & 1;
      good = good && bit == (value_of(back[position(lane, e)], dtype) != 0);
    }
  }
  check(good, "bytes of a block", Codec::kId, head_dim, 10 * density);
}

template <class Codec>
void check_blocks(DType dtype) {
  std::mt19937 random(1);
  for (double density : {0., 0.1, 0.5, 1.})
    for (Role role : {Role::kKey, Role::kValue})
      for (int head_dim : {64, 128, 256}) check_block<Codec>(role, head_dim, dtype, density, random);
}

template <class F>
bool throws_invalid_argument(F&& f) {
  try {
    f();
  } catch (std::invalid_argument const&) {
    return true;
  }
  return false;
}

void check_refusals() {
  check(throws_invalid_argument([] { codec_name(static_cast<CodecId>(3)); }), "no codec 3");
  check(throws_invalid_argument([] { check_codec(CodecId::kFp16, DType::kBFloat16); }), "fp16 stores no bfloat16");
  check(throws_invalid_argument([] { check_codec(CodecId::kE4m3, DType::kFloat32); }), "e4m3 stores no float32");
  check(throws_invalid_argument([] { own_codec(DType::kFloat32); }), "float32 has no codec");
  check(own_codec(DType::kFloat16) == CodecId::kFp16 && own_codec(DType::kBFloat16) == CodecId::kBf16, "own codecs");
}

int main() {
  check_e4m3();
  check_halves();
  check_codec_bits<Fp16Codec>(DType::kFloat16);
  check_codec_bits<Bf16Codec>(DType::kBFloat16);
  check_codec_bits<E4m3Codec>(DType::kFloat16);
  check_codec_bits<E4m3Codec>(DType::kBFloat16);
  check_blocks<Fp16Codec>(DType::kFloat16);
  check_blocks<Bf16Codec>(DType::kBFloat16);
  check_blocks<E4m3Codec>(DType::kFloat16);
  check_blocks<E4m3Codec>(DType::kBFloat16);
  check_refusals();
  return report();
}
