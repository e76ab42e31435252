// link: cute_kernels/cpu/block.cpp
// link: cute_kernels/cpu/two_of_four.cpp
// link: cute_kernels/cpu/layout.cpp
// The codecs against computations in double, value by value, and blocks of every codec against a second reader.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
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
  for (DType dtype : {DType::kFloat16, DType::kBFloat16})
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      double const value = value_of(static_cast<uint16_t>(bits), dtype);
      uint32_t const stored = Fp8Codec::encode(static_cast<float>(value));
      uint32_t const magnitude = std::isnan(value) ? 0x7f : nearest_e4m3(std::fabs(value));
      check(stored == (magnitude | (magnitude == 0x7f ? 0 : bits >> 15 << 7)), "fp8 encode", dtype, bits, stored);
    }
  for (uint32_t code = 0; code < 0x100; ++code) {
    double const exact = e4m3_magnitude(code & 0x7f), number = Fp8Codec::number(code);
    check(std::isnan(exact) ? std::isnan(number) : number == (code & 0x80 ? -exact : exact), "fp8 number", code);
    check(Fp8Codec::is_code(code) == (Fp8Codec::encode(Fp8Codec::number(code)) == code), "fp8 there and back", code);
  }
  check(Fp8Codec::encode(1 + 1.f / 16) == 0x38, "1 + 1/16 is half way to 1 + 1/8: 1 is even");
  check(Fp8Codec::encode(1 + 3.f / 16) == 0x3a, "1 + 3/16 is half way: 1 + 2/8 is even");
  check(Fp8Codec::encode(std::nextafter(2.f, 0.f)) == 0x40, "just below 2 is 2");
  check(Fp8Codec::encode(std::ldexp(1.f, -10)) == 0, "half of the smallest is a tie: 0 is even");
  check(Fp8Codec::encode(std::nextafter(std::ldexp(1.f, -10), 1.f)) == 1, "above half of the smallest");
  check(Fp8Codec::encode(464) == 0x7e && Fp8Codec::encode(INFINITY) == 0x7e, "saturates");
}

template <class Codec>
void check_integers() {
  float const most = Codec::kLargest;
  for (float x = -2 * most; x <= 2 * most; x += 0.25f) {
    double const expected = std::fmax(-most, std::fmin(most, std::nearbyint(static_cast<double>(x))));
    uint32_t const code = Codec::encode(x);
    check(Codec::number(code) == expected && Codec::is_code(code), "integer encode", Codec::kId, 4 * x, code);
  }
  check(Codec::number(Codec::encode(-INFINITY)) == -most && Codec::number(Codec::encode(NAN)) == -most, "saturates");
  check(!Codec::is_code(0) && Codec::encode(0) == static_cast<uint32_t>(most) + 1, "0 is no code", Codec::kId);
}

void check_scales() {
  std::set<int> entries;
  for (int p = 0; p < kTileTokens; ++p) entries.insert(scale_index(p));
  check(entries.size() == kTileTokens && *entries.begin() == 0 && *entries.rbegin() == kTileTokens - 1, "scale_index");
  std::mt19937 random(1);
  for (int i = 0; i < 10000; ++i) {
    float const largest = std::ldexp(1.f + random() % 4096 / 4096.f, static_cast<int>(random() % 60) - 30);
    for (float codec_largest : {7.f, 127.f, 448.f}) {
      double const scale = scale_value(token_scale(largest, codec_largest)), exact = largest / double{codec_largest};
      check(scale * 1.0000001 >= exact && scale <= exact * (1 + 1 / 127.), "a token's scale is rounded up", i);
    }
  }
  check(scale_value(token_scale(0, 7)) == std::ldexp(1, -48) &&
            scale_value(token_scale(INFINITY, 7)) == std::ldexp(1, 48) &&
            scale_value(token_scale(std::ldexp(1.f, -140), 7)) == std::ldexp(1, -48),
        "the bounds of a token's scale");
}

// What the codecs have in common: where the values of streams lie.
template <class Codec>
void check_codec_bits() {
  constexpr int kBits = Codec::kValueBits;
  uint32_t const most = (1u << kBits) - 1;
  std::set<std::tuple<int, int>> places;
  for (int stream = 0; stream < BitmapTile::kStreams; ++stream)
    for (int rank = 0; rank < 16; ++rank) {
      bool const narrow = kBits < 16;
      int const row = narrow ? 2 * (rank / (32 / kBits)) + stream : rank;
      int const shift = narrow ? kBits * (rank % (32 / kBits)) : 16 * stream;
      check(Codec::value_row(stream, rank) == row && row < Codec::value_rows(rank + 1), "value_row", stream, rank);
      check(Codec::place(most, stream, rank) == most << shift, "place", Codec::kId, stream, rank);
      check(Codec::extract(~(most << shift), stream, rank) == 0, "extract nothing else", Codec::kId, stream, rank);
      check(Codec::extract(most << shift, stream, rank) == most, "extract", Codec::kId, stream, rank);
      check(places.insert({row, shift}).second, "no place twice", Codec::kId, stream, rank);
    }
  for (int longest = 0; longest < 40; ++longest) {
    int const rows = Codec::value_rows(longest);
    check(Codec::most_values(rows) >= longest && Codec::most_values(rows - Codec::kWordRows) < std::max(longest, 1),
          "value_rows", Codec::kId, longest);
  }
  check(codec_name(Codec::kId) == std::string(Codec::kName), "visit_codec", Codec::kId);
}

// A tile of random numbers, of which about `density` are nonzero: to a block and back, and read by the rules of the
// format. Scales of channels are 1, those of tokens powers of two.
template <class Codec>
void check_block(Role role, int head_dim, DType dtype, double density, std::mt19937& random) {
  constexpr int kBits = Codec::kValueBits;
  int const elements = BitmapTile::lane_elements(head_dim), bitmap_rows = BitmapTile::bitmap_rows(head_dim);
  std::vector<uint16_t> const& table = cpu::element_table(role, head_dim);
  auto position = [&](int lane, int e) { return table[lane * elements + e]; };
  std::vector<uint16_t> dense(kTileTokens * head_dim), back(dense.size(), 0xaaaa);
  std::vector<uint16_t> channel_scales(head_dim, kScaleOfOne), token_scales(kTileTokens);
  for (uint16_t& scale : token_scales) scale = static_cast<uint16_t>((126 + random() % 2) << 7);
  auto scale_of = [&](int p) { return scale_value(token_scales[scale_index(p / head_dim)]); };
  uint16_t const one = dtype == DType::kFloat16 ? 0x3c00 : 0x3f80, step = dtype == DType::kFloat16 ? 0x400 : 0x80;
  std::bernoulli_distribution present(density);
  for (uint16_t& bits : dense) {  // powers of two from 1 to 4 times either sign, which every codec has
    if (!present(random)) continue;
    bits = static_cast<uint16_t>(Codec::kHasScales ? (one + random() % 3 * step) | (random() % 2 << 15) : random());
    if ((bits & 0x7fff) == 0) bits = 0;
  }
  std::vector<uint32_t> expected[kLanes][2];  // the streams
  for (int lane = 0; lane < kLanes; ++lane)
    for (int e = 0; e < elements; ++e) {
      int const p = position(lane, e);
      if (!dense[p]) continue;
      if constexpr (Codec::kHasScales)
        expected[lane][e % 2].push_back(Codec::encode(static_cast<float>(value_of(dense[p], dtype)) / scale_of(p)));
      else
        expected[lane][e % 2].push_back(dense[p]);
    }
  size_t longest = 0;
  for (auto& lane : expected)
    for (auto& stream : lane) longest = std::max(longest, stream.size());

  SparseView view{};
  view.role = role;
  view.dtype = dtype;
  view.codec = Codec::kId;
  view.head_dim = view.padded_head_dim = head_dim;
  int const first_row = bitmap_rows + Codec::kHasScales;
  int const value_rows = Codec::value_rows(static_cast<int>(longest)), rows = first_row + value_rows;
  std::vector<uint32_t> block(rows * kLanes, ~0u);
  cpu::write_block(view, dense.data(), {token_scales.data(), channel_scales.data()}, rows, block.data());
  cpu::read_block(view, block.data(), channel_scales.data(), rows, back.data());
  bool const clamps = std::is_same_v<Codec, Int4Codec>;  // 4 / 0.5 is 7 there
  bool good = true;
  for (size_t i = 0; i < dense.size(); ++i) {
    double const x = value_of(dense[i], dtype), most = 7 * scale_of(static_cast<int>(i));
    good = good && (clamps ? value_of(back[i], dtype) == std::fmax(-most, std::fmin(most, x)) : back[i] == dense[i]);
  }
  check(good, "a block and back", Codec::kId, head_dim, 10 * density);

  good = true;
  for (int lane = 0; lane < kLanes; ++lane) {
    std::vector<uint32_t> left(value_rows * (32 / kBits));  // what no stream has is zero
    for (size_t i = 0; i < left.size(); ++i)
      left[i] =
          block[(first_row + i / (32 / kBits)) * kLanes + lane] >> kBits * (i % (32 / kBits)) & ((1u << kBits) - 1);
    for (int s = 0; s < 2; ++s)
      for (size_t rank = 0; rank < expected[lane][s].size(); ++rank) {
        size_t const words = rank / (32 / kBits),
                     i = kBits == 16 ? 2 * rank + s : (2 * words + s) * (32 / kBits) + rank % (32 / kBits);
        good = good && left[i] == expected[lane][s][rank];
        left[i] = 0;
      }
    good = good && std::all_of(left.begin(), left.end(), [](uint32_t x) { return x == 0; });
    for (int e = 0; e < elements; ++e) {
      int const atom = e / 8 % 4, entry = e / 2 % 4;
      int const bit = kBits == 16 ? 2 * atom + e % 2 + 8 * entry : 16 * (atom / 2) + 4 * entry + 2 * (atom % 2) + e % 2;
      good = good && (block[e / 32 * kLanes + lane] >> bit & 1) == (dense[position(lane, e)] != 0);
    }
  }
  check(good, "bits of a block", Codec::kId, head_dim, 10 * density);
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
  check(throws_invalid_argument([] { codec_name(static_cast<CodecId>(5)); }), "no codec 5");
  check(throws_invalid_argument([] { check_codec(CodecId::kFp16, DType::kBFloat16); }), "fp16 stores no bfloat16");
  check(throws_invalid_argument([] { check_codec(CodecId::kFp8, DType::kFloat32); }), "fp8 stores no float32");
  check(throws_invalid_argument([] { own_codec(DType::kFloat32); }), "float32 has no codec");
  check(own_codec(DType::kFloat16) == CodecId::kFp16 && own_codec(DType::kBFloat16) == CodecId::kBf16, "own codecs");
}

template <class... Codecs>
void check_narrow_codecs() {
  (check_codec_bits<Codecs>(), ...);
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) (check_blocks<Codecs>(dtype), ...);
}

int main() {
  check_e4m3();
  check_integers<Int8Codec>();
  check_integers<Int4Codec>();
  check_scales();
  check_codec_bits<Fp16Codec>();
  check_codec_bits<Bf16Codec>();
  check_blocks<Fp16Codec>(DType::kFloat16);
  check_blocks<Bf16Codec>(DType::kBFloat16);
  check_narrow_codecs<Fp8Codec, Int8Codec, Int4Codec>();
  check_refusals();
  return report();
}
