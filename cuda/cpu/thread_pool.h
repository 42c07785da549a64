// Worker threads of one device. Written here because ranks share cores: an idle worker sleeps after a short spin,
// whereas OpenMP run times and OpenBLAS's threads keep a core busy.
#pragma once
#include <cstdint>
#include <type_traits>

namespace mimo {

class ThreadPool {
 public:
  /// `threads` includes the calling thread; 0 = one for each core this process may use. Throws if the system gives
  /// fewer.
  explicit ThreadPool(int32_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t size() const { return size_; }

  using Task = void (*)(void* context, int64_t index);
  /// Calls task(context, i) for every i in [0, count) on the pool's threads and returns when all are done. The first
  /// exception is rethrown. Not reentrant: a task must not call run.
  void run(int64_t count, Task task, void* context);

 private:
  /// Defined in the source file: dozens of kernel files include this header and should not parse <thread>.
  struct Workers;
  int32_t size_;
  Workers* workers_;
};

/// Calls body(i) for every i in [0, count) on the pool's threads.
template <class Body>
void parallel_for(ThreadPool& pool, int64_t count, Body&& body) {
  if (count <= 0) return;
  if (count == 1 || pool.size() == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  using Plain = std::remove_reference_t<Body>;
  pool.run(
      count, [](void* context, int64_t index) { (*static_cast<Plain*>(context))(index); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

/// Splits [0, total) into runs of at most `grain` and calls body(begin, end) for each. Runs depend on sizes alone,
/// never on the number of threads.
template <class Body>
void parallel_range(ThreadPool& pool, int64_t total, int64_t grain, Body&& body) {
  if (total <= 0) return;
  const int64_t runs = (total + grain - 1) / grain;
  parallel_for(pool, runs, [&](int64_t run) {
    const int64_t begin = run * grain;
    body(begin, begin + grain < total ? begin + grain : total);
  });
}

}  // namespace mimo
