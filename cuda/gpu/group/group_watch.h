// The process's thread that polls the pending calls of all groups (DeviceGroup::look): it reports to the run which call
// this rank waits for, and aborts NCCL's kernels when the run has failed.
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
  /// Never destroyed: a failing process exits with groups open.
  static GroupWatch& instance();
  void add(Run& run, DeviceGroup* group);
  /// The thread ends with the last group, after which the run may be closed.
  void remove(DeviceGroup* group);

 private:
  void work();

  std::mutex mutex_;
  std::vector<DeviceGroup*> groups_;
  Run* run_ = nullptr;
  std::thread thread_;
};

}  // namespace mimo::cuda
