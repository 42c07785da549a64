// The thread of this process that looks at the calls under way of all its groups (DeviceGroup::look): it tells the run which call
// this rank waits for, and ends NCCL's kernels when the run has failed.
#pragma once
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "run.h"

namespace mimo::cuda {

class DeviceGroup;

class GroupWatch {
 public:
  /// Never destroyed: a process that fails ends with groups open.
  static GroupWatch& instance();
  void add(Run& run, DeviceGroup* group);
  /// The thread ends with the last group: the run may be closed then.
  void remove(DeviceGroup* group);

 private:
  void work();

  std::mutex mutex_;
  std::vector<DeviceGroup*> groups_;
  Run* run_ = nullptr;
  std::thread thread_;
};

}  // namespace mimo::cuda
