// Threads that take tasks off one counter, and memory for their scratch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace cute_kernels::cpu {

class TaskQueue {
 public:
  explicit TaskQueue(int64_t tasks) : tasks_(tasks) {}

  // The next task, or -1 when there is none left.
  int64_t next() {
    int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    return task < tasks_ ? task : -1;
  }
  void cancel() { next_.store(tasks_, std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> next_{0};
  int64_t tasks_;
};

// Runs worker(queue) on up to `threads` threads, the caller's included; a worker allocates its scratch, then takes
// tasks until there are none. The first exception is thrown again here. Threads live for one call: nothing survives a
// fork.
template <class Worker>
void parallel(int threads, int64_t tasks, Worker worker) {
  TaskQueue queue(tasks);
  std::exception_ptr error;
  std::mutex error_mutex;
  auto guarded = [&] {
    try {
      worker(queue);
    } catch (...) {
      queue.cancel();
      std::lock_guard<std::mutex> lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  int64_t wanted = std::min<int64_t>(threads, tasks) - 1;
  if (wanted > 0) others.reserve(static_cast<size_t>(wanted));
  try {
    for (int64_t i = 0; i < wanted; ++i) others.emplace_back(guarded);
  } catch (std::system_error const&) {
    // No more threads to be had: those that run take all the tasks.
  }
  guarded();
  for (std::thread& thread : others) thread.join();
  if (error) std::rethrow_exception(error);
}

// An array aligned to cache lines and vectors, not initialised.
template <class T>
class AlignedArray {
 public:
  explicit AlignedArray(size_t size)
      : data_(static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t{kAlignment}))) {}
  ~AlignedArray() { ::operator delete(data_, std::align_val_t{kAlignment}); }
  AlignedArray(AlignedArray const&) = delete;
  AlignedArray& operator=(AlignedArray const&) = delete;

  T* data() { return data_; }
  T& operator[](size_t i) { return data_[i]; }

 private:
  static constexpr size_t kAlignment = 64;
  T* data_;
};

}  // namespace cute_kernels::cpu
