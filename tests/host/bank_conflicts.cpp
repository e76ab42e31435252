// Claims about shared memory: 32 banks of 4 bytes; an access of up to 4 bytes a lane is one wavefront if no two lanes
// want different words of one bank.
#include <random>
#include <set>

#include "check.hpp"
#include "cute_kernels/format/codec/codec.hpp"
#include "cute_kernels/format/tile/bitmap.hpp"

using namespace cute_kernels::format;

// Wavefronts of one access of a warp: the most distinct words that lie in one bank.
template <class AddressOf>
int wavefronts(AddressOf address_of) {
  std::set<int> words[32];
  for (int lane = 0; lane < kLanes; ++lane) {
    int word = address_of(lane) / 4;
    words[word % 32].insert(word);
  }
  size_t most = 0;
  for (auto const& bank : words) most = std::max(most, bank.size());
  return static_cast<int>(most);
}

int main() {
  std::mt19937 random(1);
  int const rows = BitmapTile::max_tile_rows<Fp16Codec>(kMaxHeadDim);
  for (int i = 0; i < 1000; ++i) {
    int row[kLanes], stream[kLanes];
    for (int lane = 0; lane < kLanes; ++lane)
      row[lane] = random() % rows, stream[lane] = random() % BitmapTile::kStreams;
    auto word = [&](int lane) { return row[lane] * kRowBytes + 4 * lane; };
    auto value = [&](int lane) { return word(lane) + kStreamBits / 8 * stream[lane]; };
    check(wavefronts(word) == 1, "a lane's words of any rows", i);
    check(wavefronts(value) == 1, "a lane's 16 bits of any rows and streams", i);
  }
  return report();
}
