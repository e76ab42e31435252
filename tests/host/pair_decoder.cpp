// What the kernels' decoder of exactly two of four makes of tiles that the CPU has packed: every register of every atom,
// and the metadata that goes with it. PTX is emulated.
// link: cute_kernels/cpu/layout.cpp
// link: cute_kernels/cpu/block.cpp
// link: cute_kernels/cpu/two_of_four.cpp
// include: tests/host/emulated
#include <cstdint>
#include <random>
#include <vector>

#include "check.hpp"
#include "cute_kernels/cpu/tile_steps.hpp"
#include "cute_kernels/cpu/two_of_four.hpp"
#include "cute_kernels/mma/decoder.hpp"

using namespace cute_kernels;
using namespace cute_kernels::format;
using Tile = TwoOfFourTile;

float ptx::e4m3_number(uint32_t code) { return Fp8Codec::number(code); }

namespace {

// A value that the codec stores exactly where all scales are 1, as fp16.
template <class Codec>
uint16_t random_value(std::mt19937& random) {
  if constexpr (!Codec::kHasScales) {
    return static_cast<uint16_t>(1 + random() % 0x7bff);
  } else {
    for (;;) {
      uint32_t code = random() % (1u << Codec::kValueBits);
      float number = Codec::number(code);
      if (Codec::is_code(code) && number == number && number != 0) return cutlass::half_t(number).storage;
    }
  }
}

template <class Codec, int kHeadDim>
void check_tile(Role role, std::mt19937& random) {
  using Decoder = mma::Decoder<TwoOfFourTile, Codec>;
  int const groups = Tile::lane_groups(kHeadDim), rows = Tile::tile_rows<Codec>(kHeadDim);
  std::vector<uint16_t> dense(kTileTokens * kHeadDim);
  std::vector<cpu::LaneGroup> const& table = cpu::lane_groups(role, kHeadDim);
  for (cpu::LaneGroup const& group : table)
    for (int i = random() % 3; i < 2; ++i) dense[group.position[random() % 4]] = random_value<Codec>(random);
  std::vector<uint16_t> of_channels(kHeadDim, kScaleOfOne), of_tokens(kTileTokens, kScaleOfOne);
  std::vector<uint32_t> block(rows * kLanes);
  SparseView view{};
  view.role = role, view.dtype = DType::kFloat16, view.codec = Codec::kId, view.tile_format = Tile::kId;
  view.head_dim = view.padded_head_dim = kHeadDim;
  cpu::write_block(view, dense.data(), {of_tokens.data(), of_channels.data()}, rows, block.data());
  std::vector<uint16_t> again(dense.size());
  cpu::read_block(view, block.data(), of_channels.data(), rows, again.data());
  check(again == dense, "a block is read as it was written", Codec::kValueBits, kHeadDim);

  shared_memory = reinterpret_cast<unsigned char const*>(block.data());
  bool right = true;
  for (int lane = 0; lane < kLanes; ++lane)
    for (int atom = 0; atom < groups / Tile::kAtomGroups; ++atom) {
      uint32_t a[Tile::kAtomGroups];
      int row = Tile::first_value_row<Codec>(kHeadDim) + atom * Decoder::kRows;
      Decoder::load(row * kRowBytes + 4 * lane, a);
      for (int r = 0; r < Tile::kAtomGroups; ++r) {
        cpu::LaneGroup const& group = table[lane * groups + Tile::kAtomGroups * atom + r];
        uint32_t kept = block[group.metadata_word] >> group.metadata_bit & 15;
        right &= (kept & 3) < (kept >> 2);
        for (int i = 0; i < Tile::kKept; ++i)
          right &= (a[r] >> 16 * i & 0xffff) == dense[group.position[kept >> 2 * i & 3]];
      }
    }
  check(right, "registers", Codec::kValueBits, kHeadDim, static_cast<int>(role));
}

// A group's elements by its two values and its metadata.
void check_selectors() {
  uint32_t const values[2] = {0x8001, 0xfffe}, pair = values[0] | values[1] << 16;
  for (uint32_t first = 0; first < 4; ++first)
    for (uint32_t second = first + 1; second < 4; ++second) {
      uint32_t selectors = mma::group_selectors(first | second << 2);
      for (uint32_t i = 0; i < 4; ++i) {
        uint32_t elements = ptx::permute_bytes(pair, 0, i < 2 ? selectors : selectors >> 16);
        uint32_t expected = i == first ? values[0] : i == second ? values[1] : 0;
        check((elements >> 16 * (i % 2) & 0xffff) == expected, "elements of a group", first, second, i);
      }
    }
}

template <class Codec>
void check_codec() {
  std::mt19937 random(1);
  for (Role role : {Role::kKey, Role::kValue}) {
    check_tile<Codec, 64>(role, random);
    check_tile<Codec, 128>(role, random);
    check_tile<Codec, 256>(role, random);
  }
}

}  // namespace

int main() {
  check_selectors();
  check_codec<Fp16Codec>();
  check_codec<Fp8Codec>();
  check_codec<Int8Codec>();
  check_codec<Int4Codec>();
  return report();
}
