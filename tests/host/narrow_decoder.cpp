// What the kernels' decoder of narrow codecs makes of tiles that the CPU has packed: every register, with a lane's
// elements in one to four parts. PTX is emulated.
// link: cute_kernels/cpu/layout.cpp
// link: cute_kernels/cpu/block.cpp
// link: cute_kernels/cpu/two_of_four.cpp
// include: tests/host/emulated
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.hpp"
#include "cute_kernels/cpu/layout.hpp"
#include "cute_kernels/cpu/tile_steps.hpp"
#include "cute_kernels/mma/decoder.hpp"

using namespace cute_kernels;
using namespace cute_kernels::format;

float ptx::e4m3_number(uint32_t code) { return Fp8Codec::number(code); }

namespace {

struct Registers {
  uint32_t* words;
  uint32_t& operator()(int i) { return words[i]; }
};

struct Packed {
  std::vector<uint16_t> dense;  // [64, head_dim]: plus or minus 1, 2 and 4, which every codec stores exactly
  std::vector<uint32_t> block;  // other words behind its end
};

template <class Codec>
Packed pack(Role role, int head_dim, double density, std::mt19937& random) {
  Packed packed{std::vector<uint16_t>(kTileTokens * head_dim), {}};
  std::bernoulli_distribution is_kept(density);
  for (auto& x : packed.dense) {
    if (is_kept(random)) x = static_cast<uint16_t>((0x3c00 + random() % 3 * 0x400) | random() % 2 << 15);
  }
  int lane_elements = BitmapTile::lane_elements(head_dim);
  auto const& elements = cpu::element_table(role, head_dim);
  int longest = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    int counts[2] = {0, 0};
    for (int e = 0; e < lane_elements; ++e) counts[e % 2] += packed.dense[elements[lane * lane_elements + e]] != 0;
    longest = std::max({longest, counts[0], counts[1]});
  }
  int rows = BitmapTile::first_value_row<Codec>(head_dim) + Codec::value_rows(longest);
  packed.block.resize((rows + mma::Decoder<format::BitmapTile, Codec>::kRowsBehind) * kLanes);
  for (auto& word : packed.block) word = static_cast<uint32_t>(random());
  std::vector<uint16_t> of_channels(head_dim, kScaleOfOne), of_tokens(kTileTokens, kScaleOfOne);
  SparseView view{};
  view.role = role, view.dtype = DType::kFloat16, view.codec = Codec::kId;
  view.head_dim = view.padded_head_dim = head_dim;
  cpu::write_block(view, packed.dense.data(), {of_tokens.data(), of_channels.data()}, rows, packed.block.data());
  return packed;
}

// Register i of a word or of two: a pair of neighbours of one stream, see BitmapTile.
template <class Codec, int kHeadDim, int kParts, bool kAtOnce = false>
bool decodes(Role role, Packed const& packed) {
  using Decoder = mma::Decoder<BitmapTile, Codec>;
  constexpr int kWords = BitmapTile::bitmap_rows(kHeadDim) / kParts, kStep = std::min(kWords, 2);
  auto const& elements = cpu::element_table(role, kHeadDim);
  shared_memory = reinterpret_cast<unsigned char const*>(packed.block.data());
  bool right = true;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int part = 0; part < kParts; ++part) {
      auto at = Decoder::template first<kHeadDim, kParts, kAtOnce>(lane * sizeof(uint32_t), part);
      for (int word = part * kWords; word < (part + 1) * kWords; word += kStep) {
        uint32_t words[32];
        Registers r{words};
        uint32_t const* bitmap = &packed.block[word * kLanes + lane];
        if constexpr (kAtOnce) {  // two atoms at a time
          for (int atom = 0; atom < 4 * kStep; atom += 2) {
            Registers of_atoms{words + 4 * atom};
            Decoder::decode16(bitmap[atom / 4 * kLanes], atom % 4, at, of_atoms);
          }
        } else if constexpr (kStep == 2) {
          Decoder::decode64(bitmap[0], bitmap[kLanes], at, r);
        } else {
          Decoder::decode32(bitmap[0], at, r);
        }
        for (int i = 0; i < 16 * kStep; ++i) {
          for (int half = 0; half < 2; ++half) {
            int element = 32 * word + 8 * (i / 4) + 4 * (i % 2) + 2 * half + i % 4 / 2;
            uint32_t expected = packed.dense[elements[lane * BitmapTile::lane_elements(kHeadDim) + element]];
            right &= (words[i] >> 16 * half & 0xffff) == expected;
          }
        }
      }
    }
  }
  return right;
}

template <class Codec, int kHeadDim>
void check_head_dim(Role role, double density, std::mt19937& random) {
  Packed packed = pack<Codec>(role, kHeadDim, density, random);
  check(decodes<Codec, kHeadDim, 1>(role, packed), Codec::kName);
  check(decodes<Codec, kHeadDim, 2>(role, packed), Codec::kName);
  check(decodes<Codec, kHeadDim, 4>(role, packed), Codec::kName);
  check(decodes<Codec, kHeadDim, 4, true>(role, packed), Codec::kName);
}

template <class Codec>
void check_codec() {
  std::mt19937 random(1);
  for (double density : {0., .1, .3, .5, .9, 1.}) {
    for (Role role : {Role::kKey, Role::kValue}) {
      check_head_dim<Codec, 64>(role, density, random);
      check_head_dim<Codec, 128>(role, density, random);
      check_head_dim<Codec, 256>(role, density, random);
    }
  }
}

}  // namespace

int main() {
  check_codec<Fp8Codec>();
  check_codec<Int8Codec>();
  check_codec<Int4Codec>();
  return report();
}
