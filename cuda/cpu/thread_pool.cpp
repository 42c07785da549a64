#include "thread_pool.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "processor.h"
#include "start_thread.h"

namespace mimo {
namespace {

constexpr uint64_t index_bits = 40;
constexpr uint64_t index_mask = (uint64_t{1} << index_bits) - 1;
// About the time of two small operations; waiting longer, a sleeping worker costs less than a spinning one.
constexpr auto spin_time = std::chrono::microseconds(30);

void relax() { __builtin_ia32_pause(); }

template <class Done>
bool spin_until(Done&& done) {
  const auto deadline = std::chrono::steady_clock::now() + spin_time;
  while (!done()) {
    for (int i = 0; i < 32; ++i) relax();
    if (std::chrono::steady_clock::now() > deadline) return done();
  }
  return true;
}

}  // namespace

struct ThreadPool::Workers {
  /// `total` includes the calling thread.
  explicit Workers(int32_t total);
  ~Workers() { end(); }

  void run(int64_t count, Task task, void* context);

 private:
  void work();
  void end();
  void take_indices(int64_t generation);

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int64_t> generation_{0};
  std::atomic<bool> stop_{false};
  // Job generation << 40 | next index, so that a late worker cannot take an index of the next job.
  std::atomic<uint64_t> claim_{0};
  std::atomic<int64_t> finished_{0};
  std::atomic<int64_t> count_{0};
  std::atomic<Task> task_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

ThreadPool::ThreadPool(int32_t threads)
    : size_(threads > 0 ? threads : usable_cores()), workers_(new Workers(size_)) {}

ThreadPool::~ThreadPool() { delete workers_; }

void ThreadPool::run(int64_t count, Task task, void* context) { workers_->run(count, task, context); }

ThreadPool::Workers::Workers(int32_t total) {
  try {
    for (int32_t i = 1; i < total; ++i) threads_.push_back(start_thread([this] { work(); }));
  } catch (...) {
    // A std::thread destroyed without join would terminate the process.
    end();
    throw;
  }
}

void ThreadPool::Workers::end() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::Workers::run(int64_t count, Task task, void* context) {
  int64_t generation;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation = generation_.load(std::memory_order_relaxed) + 1;
    const uint64_t base = static_cast<uint64_t>(generation) << index_bits;
    // Closes the previous claim first: a worker that still holds it must not read the new count and take an index.
    claim_.store(base | index_mask, std::memory_order_seq_cst);
    count_.store(count);
    task_.store(task);
    context_.store(context);
    finished_.store(0);
    claim_.store(base, std::memory_order_release);
    generation_.store(generation, std::memory_order_release);
  }
  wake_.notify_all();
  take_indices(generation);
  // The caller spins: the others are in the middle of a task of the same size as its last.
  while (finished_.load(std::memory_order_acquire) < count) {
    if (!spin_until([&] { return finished_.load(std::memory_order_acquire) >= count; })) sched_yield();
  }
  if (error_) {
    const std::exception_ptr error = error_;
    error_ = nullptr;
    std::rethrow_exception(error);
  }
}

void ThreadPool::Workers::take_indices(int64_t generation) {
  const uint64_t base = static_cast<uint64_t>(generation) << index_bits;
  uint64_t claim = claim_.load(std::memory_order_acquire);
  while (true) {
    // Another generation in the upper bits: this job is over.
    if ((claim & ~index_mask) != (base & ~index_mask)) return;
    const int64_t index = static_cast<int64_t>(claim & index_mask);
    if (index >= count_.load()) return;
    if (!claim_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) continue;
    try {
      task_.load()(context_.load(), index);
    } catch (...) {
      std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
    finished_.fetch_add(1, std::memory_order_acq_rel);
    claim = claim_.load(std::memory_order_acquire);
  }
}

void ThreadPool::Workers::work() {
  int64_t seen = 0;
  while (true) {
    const auto changed = [&] { return stop_.load() || generation_.load(std::memory_order_acquire) != seen; };
    if (!spin_until(changed)) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, changed);
    }
    if (stop_) return;
    seen = generation_.load(std::memory_order_acquire);
    take_indices(seen);
  }
}

}  // namespace mimo
