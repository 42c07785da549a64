#include "group_watch.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "device_group.h"
#include "error.h"
#include "start_thread.h"

namespace mimo::cuda {
namespace {

/// Calls that take longer are reported as waiting for others.
constexpr int64_t patience = 1'000'000'000;

/// Aborts all in parallel: sequentially they would take seconds, and the training thread waits in a kernel of the last.
void abort_together(const std::vector<ncclComm_t>& communicators) {
  std::vector<std::thread> aborts;
  for (const ncclComm_t handle : communicators) {
    try {
      aborts.push_back(start_thread([handle] { abort_communicator(handle); }));
    } catch (const Error&) {
      abort_communicator(handle);
    }
  }
  for (std::thread& one : aborts) one.join();
}

}  // namespace

GroupWatch& GroupWatch::instance() {
  static GroupWatch& watch = *new GroupWatch;
  return watch;
}

void GroupWatch::add(Run& run, DeviceGroup* group) {
  std::lock_guard<std::mutex> lock(mutex_);
  run_ = &run;
  if (!thread_.joinable()) thread_ = start_thread([this] { work(); });
  groups_.push_back(group);
}

void GroupWatch::remove(DeviceGroup* group) {
  std::thread ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_.erase(std::remove(groups_.begin(), groups_.end(), group), groups_.end());
    if (groups_.empty()) ended = std::move(thread_);
  }
  if (ended.joinable()) ended.join();
}

void GroupWatch::work() {
  for (;;) {
    std::vector<ncclComm_t> ended;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (groups_.empty()) return;
      std::pair<int64_t, int64_t> oldest{-1, 0};
      for (DeviceGroup* group : groups_) {
        const std::pair<int64_t, int64_t> of = group->look(ended);
        if (of.first >= 0 && (oldest.first < 0 || of.second < oldest.second)) oldest = of;
      }
      const bool waits = oldest.first >= 0 && monotonic_nanoseconds() - oldest.second > patience;
      if (ended.empty() && !run_->failed()) run_->region(run_->rank()).waiting_call.store(waits ? oldest.first : -1);
    }
    abort_together(ended);
    usleep(20'000);
  }
}

}  // namespace mimo::cuda
