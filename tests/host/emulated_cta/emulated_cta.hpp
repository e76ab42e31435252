// A CTA on the host, for programs with the line `// include: tests/host/emulated_cta`: every lane is a thread. What a
// lane waits for longer than kPatience is taken never to come, and ends the program.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace emulated {

inline constexpr std::chrono::seconds kPatience{60};

// One lock for all: programs are small.
inline std::mutex mutex;
inline std::condition_variable changed;

template <class Condition>
void wait_until(std::unique_lock<std::mutex>& lock, char const* what, Condition&& condition) {
  if (changed.wait_for(lock, kPatience, condition)) return;
  std::fprintf(stderr, "failed: waits forever for %s\n", what);
  std::_Exit(1);
}

// As many arrivals as `expected` end a phase.
struct Barrier {
  int arrived = 0, phase = 0;

  void arrive(int count, int expected) {
    arrived += count;
    if (arrived < expected) return;
    arrived = 0, ++phase;
    changed.notify_all();
  }
};

// `lanes` of its threads are there: the others' part is done by them.
struct Warp {
  int lanes;
  Barrier barrier;
  std::array<uint32_t, 32> words;
};

struct Index {
  int x;
};

inline thread_local Warp* warp = nullptr;
inline Barrier named[16];

}  // namespace emulated

inline thread_local emulated::Index threadIdx;
inline emulated::Index blockDim;

inline void __syncwarp() {
  using namespace emulated;
  std::unique_lock lock(mutex);
  int phase = warp->barrier.phase;
  warp->barrier.arrive(1, warp->lanes);
  wait_until(lock, "a warp's lanes", [&] { return warp->barrier.phase != phase; });
}

inline uint32_t __shfl_sync(unsigned, uint32_t word, int lane) {
  emulated::warp->words[threadIdx.x % 32] = word;
  __syncwarp();
  word = emulated::warp->words[lane];
  __syncwarp();
  return word;
}

using std::min;  // as in device code
