// The tile format of at most two of four: one place for every slot, and what the kernels' decoder makes of tiles that the
// CPU has packed. PTX is emulated.
// link: cute_kernels/cpu/layout.cpp
// link: cute_kernels/cpu/block.cpp
// link: cute_kernels/cpu/two_of_four.cpp
// include: tests/host/emulated
#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "check.hpp"
#include "cute_kernels/cpu/tile_steps.hpp"
#include "cute_kernels/cpu/two_of_four.hpp"
#include "cute_kernels/mma/decoder.hpp"

using namespace cute_kernels;
using namespace cute_kernels::format;
using Tile = TwoOfFourBitmapTile;

float ptx::e4m3_number(uint32_t code) { return Fp8Codec::number(code); }

namespace {

// Slots of an atom fill registers a0 to a3 in turn, whose bits are those of a bitmap's first two registers of either
// stream.
template <class Codec>
void check_slots(int head_dim) {
  using Packed = Tile::Packed<Codec>;
  int const slots = Tile::lane_slots(head_dim);
  check(slots == 2 * Tile::lane_groups(head_dim), "two slots a group", head_dim);
  check(Tile::bitmap_rows(head_dim) * 32 == slots, "a bit a slot", head_dim);
  check(Packed::kStreams == (Codec::kIsNarrow ? 1 : 2), "streams", Codec::kValueBits);
  std::set<std::pair<int, int>> bits;
  int lengths[2] = {0, 0};
  for (int group = 0; group < Tile::lane_groups(head_dim); ++group)
    for (int i = 0; i < 2; ++i) {
      int slot = Tile::slot(group, i), atom = group / 4, reg = group % 4, s = Tile::stream<Codec>(slot);
      int quad = reg / 2, entry = i + 2 * (reg % 2), bit = Tile::bitmap_bit<Codec>(slot);
      check(slot == 8 * atom + 2 * reg + i, "register by register", slot);
      check(s == (Codec::kIsNarrow ? 0 : quad), "stream", slot);
      check(Tile::bitmap_word(slot) == atom / 4, "a word has four atoms", slot);
      if (Codec::kIsNarrow)
        check(bit == 16 * (atom % 4 / 2) + 2 * (atom % 2) + quad + 4 * entry, "bit", slot);
      else
        check(bit == 2 * (atom % 4) + quad + 8 * entry, "bit", slot);
      bits.insert({Tile::bitmap_word(slot), bit});
      ++lengths[s];
    }
  check(int(bits.size()) == slots, "every slot has one bit", int(bits.size()));
  check(std::max(lengths[0], lengths[1]) == Tile::stream_slots<Codec>(head_dim), "slots of a stream", lengths[0]);
  int const rows = head_dim / 16 + head_dim / 32 + Codec::kScaleRows;
  check(Tile::first_value_row<Codec>(head_dim) == rows, "rows before values", head_dim);
  check(Tile::max_tile_rows<Codec>(head_dim) == rows + head_dim * Codec::kValueBits / 32, "rows", head_dim);
}

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

struct Registers {
  uint32_t* words;
  uint32_t& operator()(int i) { return words[i]; }
};

// The registers of a lane's atoms, by parts as warps take them.
template <class Codec, int kHeadDim, int kParts>
bool decodes(std::vector<cpu::LaneGroup> const& table, std::vector<uint16_t> const& dense,
             std::vector<uint32_t> const& block) {
  using Decoder = mma::Decoder<Tile, Codec>;
  constexpr int kWords = Tile::bitmap_rows(kHeadDim) / kParts, kStep = std::min(kWords, 2);
  int const groups = Tile::lane_groups(kHeadDim);
  bool right = true;
  for (int lane = 0; lane < kLanes; ++lane)
    for (int part = 0; part < kParts; ++part) {
      auto at = Decoder::template first<kHeadDim, kParts>(lane * sizeof(uint32_t), part);
      for (int word = part * kWords; word < (part + 1) * kWords; word += kStep) {
        uint32_t words[32];
        Registers r{words};
        uint32_t const* bitmap = &block[(Tile::metadata_rows(kHeadDim) + word) * kLanes + lane];
        if constexpr (kStep == 2)
          Decoder::decode64(bitmap[0], bitmap[kLanes], at, r);
        else
          Decoder::decode32(bitmap[0], at, r);
        for (int i = 0; i < 16 * kStep; ++i) {
          cpu::LaneGroup const& group = table[lane * groups + 16 * word + i];
          uint32_t kept = block[group.metadata_word] >> group.metadata_bit & 15;
          right &= (kept & 3) < (kept >> 2);
          for (int half = 0; half < 2; ++half)
            right &= (words[i] >> 16 * half & 0xffff) == dense[group.position[kept >> 2 * half & 3]];
        }
      }
    }
  return right;
}

template <class Codec, int kHeadDim>
void check_tile(Role role, double density, std::mt19937& random) {
  using Packed = Tile::Packed<Codec>;
  std::bernoulli_distribution is_kept(density);
  std::vector<uint16_t> dense(kTileTokens * kHeadDim);
  std::vector<cpu::LaneGroup> const& table = cpu::lane_groups(role, kHeadDim);
  int const groups = Tile::lane_groups(kHeadDim);
  int longest = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    int lengths[2] = {0, 0};
    for (int g = 0; g < groups; ++g) {
      cpu::LaneGroup const& group = table[lane * groups + g];
      for (int i = 0; i < 2; ++i)
        if (is_kept(random)) dense[group.position[random() % 4]] = random_value<Codec>(random);
      for (int i = 0; i < 4; ++i) lengths[Tile::stream<Codec>(Tile::slot(g, 0))] += dense[group.position[i]] != 0;
    }
    longest = std::max({longest, lengths[0], lengths[1]});
  }
  int const rows = Tile::first_value_row<Codec>(kHeadDim) + Packed::value_rows(longest);
  std::vector<uint16_t> of_channels(kHeadDim, kScaleOfOne), of_tokens(kTileTokens, kScaleOfOne);
  std::vector<uint32_t> block((rows + mma::Decoder<Tile, Codec>::kRowsBehind) * kLanes);
  for (auto& word : block) word = static_cast<uint32_t>(random());
  SparseView view{};
  view.role = role, view.dtype = DType::kFloat16, view.codec = Codec::kId, view.tile_format = Tile::kId;
  view.head_dim = view.padded_head_dim = kHeadDim;
  cpu::write_block(view, dense.data(), {of_tokens.data(), of_channels.data()}, rows, block.data());
  std::vector<uint16_t> again(dense.size());
  cpu::read_block(view, block.data(), of_channels.data(), rows, again.data());
  check(again == dense, "a block is read as it was written", Codec::kValueBits, kHeadDim);
  if constexpr (Codec::kIsNarrow) {  // the other decoder is not emulated
    shared_memory = reinterpret_cast<unsigned char const*>(block.data());
    bool right = decodes<Codec, kHeadDim, 1>(table, dense, block) && decodes<Codec, kHeadDim, 2>(table, dense, block);
    check(right, "registers", Codec::kValueBits, kHeadDim, static_cast<int>(role));
  }
}

template <class Codec>
void check_codec() {
  std::mt19937 random(1);
  for (int head_dim : {64, 128, 256}) check_slots<Codec>(head_dim);
  for (double density : {0., .1, .5, .9, 1.})
    for (Role role : {Role::kKey, Role::kValue}) {
      check_tile<Codec, 64>(role, density, random);
      check_tile<Codec, 128>(role, density, random);
      check_tile<Codec, 256>(role, density, random);
    }
}

}  // namespace

int main() {
  check_codec<Fp16Codec>();
  check_codec<Fp8Codec>();
  check_codec<Int8Codec>();
  check_codec<Int4Codec>();
  return report();
}
