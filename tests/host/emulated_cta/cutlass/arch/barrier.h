// In place of CUTLASS's: mbarriers.
#pragma once

#include "emulated_cta.hpp"

namespace cutlass::arch {

class ClusterBarrier {
 public:
  void init(int arrivals) {
    std::unique_lock lock(emulated::mutex);
    arrivals_ = pending_ = arrivals;
  }
  void arrive() { complete(1, 0); }
  // Until the phase of this parity is over: the one before counts as over, too.
  void wait(uint32_t parity) {
    std::unique_lock lock(emulated::mutex);
    emulated::wait_until(lock, "an mbarrier", [&] { return (phase_ & 1) != parity; });
  }

 protected:
  void complete(int arrivals, int bytes) {
    std::unique_lock lock(emulated::mutex);
    pending_ -= arrivals, bytes_ += bytes;
    if (pending_ > 0 || bytes_ > 0) return;
    pending_ = arrivals_, ++phase_;
    emulated::changed.notify_all();
  }

 private:
  int arrivals_ = 0, pending_ = 0, bytes_ = 0;
  uint32_t phase_ = 0;
};

class ClusterTransactionBarrier : public ClusterBarrier {
 public:
  void arrive_and_expect_tx(int bytes) { complete(1, bytes); }
  void expect_transaction(int bytes) { complete(0, bytes); }
  void complete_transaction(int bytes) { complete(0, -bytes); }
};

inline void fence_barrier_init() {}

}  // namespace cutlass::arch
