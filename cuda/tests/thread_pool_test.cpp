// Stress tests of the worker threads: many short loops, loops of every length, exceptions, several pools at once, and a
// system that refuses threads.
#include "thread_pool.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "status.h"

namespace {

/// Each index is visited once, before the loop returns.
void every_index_once(mimo::ThreadPool& pool, int64_t count) {
  std::vector<std::atomic<int32_t>> visits(static_cast<size_t>(count));
  mimo::parallel_for(pool, count, [&](int64_t i) { visits[static_cast<size_t>(i)].fetch_add(1); });
  int64_t once = 0;
  for (const auto& visit : visits) once += visit.load() == 1 ? 1 : 0;
  CHECK(once == count);
}

/// Short loops back to back: a late worker must not take an index of the next loop, nor may results be read too early.
void many_short_loops(mimo::ThreadPool& pool, int64_t loops) {
  int64_t wrong = 0;
  for (int64_t loop = 0; loop < loops; ++loop) {
    const int64_t count = 1 + loop % 7;
    int64_t plain[7] = {};  // not atomic: the end of the loop must make the writes visible
    mimo::parallel_for(pool, count, [&](int64_t i) { plain[i] = loop * 10 + i; });
    for (int64_t i = 0; i < 7; ++i) wrong += plain[i] == (i < count ? loop * 10 + i : 0) ? 0 : 1;
  }
  CHECK(wrong == 0);
}

/// Pauses around the workers' spin time, which meet them spinning, falling asleep and asleep.
void loops_after_pauses(mimo::ThreadPool& pool) {
  for (int64_t pause = 0; pause < 60; ++pause) {
    every_index_once(pool, 5);
    std::this_thread::sleep_for(std::chrono::microseconds(pause));
  }
}

/// Exceptions reach the caller, one if there are several, and the pool keeps working.
void exceptions(mimo::ThreadPool& pool) {
  for (int64_t round = 0; round < 200; ++round) {
    std::atomic<int64_t> visits{0};
    std::string message;
    try {
      mimo::parallel_for(pool, 20, [&](int64_t i) {
        visits.fetch_add(1);
        if (i % 5 == round % 5) throw std::runtime_error("index " + std::to_string(i));
      });
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    CHECK(message.rfind("index ", 0) == 0);
    // On one thread the loop ends at once; otherwise the others finish their current tasks.
    CHECK(visits.load() >= 1 && visits.load() <= 20);
    every_index_once(pool, 9);
  }
}

void ranges(mimo::ThreadPool& pool) {
  for (const int64_t total : {0, 1, 63, 64, 65, 1000}) {
    std::atomic<int64_t> covered{0}, runs{0};
    mimo::parallel_range(pool, total, 64, [&](int64_t begin, int64_t end) {
      CHECK(begin % 64 == 0 && begin < end && end - begin <= 64 && end <= total);
      covered.fetch_add(end - begin);
      runs.fetch_add(1);
    });
    CHECK(covered.load() == total);
    CHECK(runs.load() == (total + 63) / 64);
  }
}

/// Size of this process's address space in bytes.
rlim_t address_space() {
  rlim_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
}

/// The system grants only some of the threads: an error, and the process survives.
void refused_threads() {
  const pid_t child = fork();
  if (child == 0) {
    const rlim_t room = address_space() + (rlim_t{100} << 20);  // stacks of some threads
    const rlimit limit{room, room};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
    try {
      mimo::ThreadPool pool(10'000);
    } catch (const mimo::Error& error) {
      const bool told = std::string(error.what()).find("no more threads") != std::string::npos;
      _exit(told && error.status() == MIMO_ERROR_DEVICE ? 0 : 3);
    }
    _exit(4);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

int main() {
  refused_threads();
  for (const int32_t threads : {1, 2, 5}) {
    mimo::ThreadPool pool(threads);
    CHECK(pool.size() == threads);
    for (int64_t count = 0; count < 40; ++count) every_index_once(pool, count);
    every_index_once(pool, 10000);
    many_short_loops(pool, 20000);
    loops_after_pauses(pool);
    exceptions(pool);
    ranges(pool);
  }
  // Pools created and destroyed at once, with and without work; several pools alive, each with its own caller.
  for (int64_t i = 0; i < 50; ++i) {
    mimo::ThreadPool pool(3);
    if (i % 2 == 0) every_index_once(pool, 3);
  }
  std::vector<std::thread> callers;
  for (int64_t i = 0; i < 3; ++i) {
    callers.emplace_back([] {
      mimo::ThreadPool pool(2);
      many_short_loops(pool, 3000);
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(mimo::ThreadPool(0).size() >= 1);
  return failures == 0 ? 0 : 1;
}
