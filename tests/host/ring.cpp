// The ring of stages: producers fill it as they do on a GPU, every lane a thread. Each worker finds its tiles in their
// order, no stage is filled before it has been released, no more tiles are in flight than may be, at first no fewer, and
// nobody waits forever. Memory and workers are slow, so that a wait left out is noticed.
// include: tests/host/emulated_cta
#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "cute_kernels/pipeline/bulk/fill_ring.hpp"

using namespace cute_kernels::pipeline;

constexpr int kStageBytes = sizeof(int), kReleased = -1;

struct Case {
  int workers, producers, stages, iterations;
  TilesInFlight in_flight;
  bool limits_later;
  int missing;  // a worker that has no tiles, or -1

  int tiles() const { return (workers - (missing >= 0)) * iterations; }
};
Case current;

bool check_case(bool holds, char const* what, int number) {
  Case const& c = current;
  return check(holds, what, number, c.workers, c.producers, c.stages, c.iterations, c.in_flight.first,
               c.in_flight.later, c.limits_later, c.missing);
}

// Tiles in flight arrive in any order.
class Memory {
 public:
  void copy(int number, int* stage, cutlass::arch::ClusterTransactionBarrier& full) {
    int producer = number % current.producers;
    std::lock_guard lock(emulated::mutex);
    copies_.push_back({number, stage, &full});
    bool first = number < current.stages;
    int later = current.limits_later ? current.in_flight.later : 0;
    int most = (first ? current.in_flight.first : later) / current.producers;
    ++of_producer_[producer];
    check_case(most == 0 || of_producer_[producer] <= most, "too many tiles are in flight", number);
    emulated::changed.notify_all();
  }

  // All copies, the first when as many are in flight as may be.
  void serve(unsigned seed) {
    std::mt19937 random(seed);
    if (current.missing < 0) {
      std::unique_lock lock(emulated::mutex);
      size_t at_first = std::min({current.in_flight.first, current.stages, current.tiles()});
      emulated::wait_until(lock, "tiles in flight at first", [&] { return copies_.size() >= at_first; });
    }
    for (int served = 0; served < current.tiles();) {
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 10));
      std::unique_lock lock(emulated::mutex);
      if (copies_.empty()) continue;
      auto at = copies_.begin() + random() % copies_.size();
      Copy copy = *at;
      copies_.erase(at);
      --of_producer_[copy.number % current.producers];
      check_case(*copy.stage == kReleased, "a stage is filled before it has been released", copy.number);
      *copy.stage = copy.number;
      lock.unlock();
      copy.full->complete_transaction(kStageBytes);
      ++served;
    }
  }

 private:
  struct Copy {
    int number;
    int* stage;
    cutlass::arch::ClusterTransactionBarrier* full;
  };

  std::deque<Copy> copies_;
  int of_producer_[kMaxProducers] = {};
};

template <bool kLimitsLater_>
struct TileLoad {
  static constexpr bool kLimitsLater = kLimitsLater_;

  int number = -1;  // -1: none

  TileLoad() = default;
  TileLoad(std::reference_wrapper<Memory> const&, int number) {
    if (number % current.workers != current.missing) this->number = number;
  }
  void load(std::reference_wrapper<Memory> const& memory, uint8_t* stage,
            cutlass::arch::ClusterTransactionBarrier& full) const {
    if (number < 0) return full.arrive();
    bool copies_first = number % 3 == 0;  // and arrives then
    if (copies_first)
      full.expect_transaction(kStageBytes);
    else
      full.arrive_and_expect_tx(kStageBytes);
    memory.get().copy(number, reinterpret_cast<int*>(stage), full);
    if (copies_first) full.arrive_and_expect_tx(0);
  }
};

void run(Case const& c, unsigned seed) {
  current = c;
  for (auto& barrier : emulated::named) barrier = {};
  int all_warps = kMaxProducers + c.workers;
  blockDim.x = 32 * all_warps;
  Config config{};
  config.workers = c.workers;
  config.producers = c.producers;
  config.in_flight = c.in_flight;
  RingShape shape = ring_shape({c.stages, kStageBytes, kStageBytes}, config);
  auto barriers = std::make_unique<RingBarriers>();
  std::vector<int> data(c.stages, kReleased);
  StageRing ring{shape, *barriers, reinterpret_cast<uint8_t*>(data.data()), 1};
  Memory memory;
  std::vector<emulated::Warp> warps(all_warps);
  std::vector<std::thread> threads;
  auto start = [&](int warp, int lanes, auto&& lane_of) {
    warps[warp].lanes = lanes;
    for (int lane = 0; lane < lanes; ++lane) {
      threads.emplace_back([&, warp, lane, lane_of] {
        emulated::warp = &warps[warp];
        threadIdx.x = 32 * warp + lane;
        lane_of();
      });
    }
  };
  for (int producer = 0; producer < kMaxProducers; ++producer)
    start(producer, producer < c.producers ? 32 : 1, [&, producer] {
      if (c.limits_later)
        fill_ring<TileLoad<true>>(ring, producer, c.iterations, std::ref(memory));
      else
        fill_ring<TileLoad<false>>(ring, producer, c.iterations, std::ref(memory));
    });
  for (int worker = 0; worker < c.workers; ++worker)
    start(kMaxProducers + worker, 1, [&, worker] {
      ring.open(worker);
      ring.arrive();
      RingReader reader(ring, worker);
      for (int i = 0; i < c.iterations; ++i) {
        int& tile = *reinterpret_cast<int*>(reader.wait());
        int expected = worker == c.missing ? kReleased : i * c.workers + worker;
        check_case(tile == expected, "a worker finds another tile", expected);
        if ((worker + i) % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        tile = kReleased;
        reader.release();
      }
    });
  threads.emplace_back([&] { memory.serve(seed); });
  for (auto& thread : threads) thread.join();
}

int main() {
  std::mt19937 random(std::random_device{}());
  auto draw = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int i = 0; i < 12; ++i) {
    Case c{};
    c.producers = i % kMaxProducers + 1;
    c.workers = c.producers * draw(1, 4);
    c.stages = c.workers + c.producers * draw(1, 4);
    c.iterations = draw(1, 8);
    if (i == 0) c.stages = 40;                                              // more than a warp looks up at a time
    if (i < 2) c.iterations = 65 / (c.workers / c.producers) + draw(1, 4);  // so is each producer's share
    int first = draw(1, 3), most = c.stages / c.producers;                  // of a producer
    int least = std::min(first, most);
    c.in_flight = {c.producers * first, c.producers * (i % 3 == 0 ? 0 : i % 3 == 1 ? least : draw(least, most))};
    c.limits_later = i % 5 != 4;  // else whatever limit there is means nothing
    c.missing = draw(0, 2) == 0 ? draw(0, c.workers - 1) : -1;
    run(c, random());
  }
  return report();
}
