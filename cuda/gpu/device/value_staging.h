// Memory through which host values go to a GPU and come back.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "error.h"

namespace mimo::cuda {

/// As large as the largest asked for so far.
class ValueStaging {
 public:
  ValueStaging() { check(cudaEventCreateWithFlags(&used_, cudaEventDisableTiming), "creating an event"); }
  ~ValueStaging() {
    release();
    cudaEventDestroy(used_);
  }
  ValueStaging(const ValueStaging&) = delete;
  ValueStaging& operator=(const ValueStaging&) = delete;

  /// Memory on the current device. Its earlier content is lost.
  void reserve(int64_t bytes) {
    if (bytes <= bytes_) return;
    release();
    bytes = std::max<int64_t>(bytes, 4096);
    check(cudaMallocHost(reinterpret_cast<void**>(&host_), static_cast<size_t>(bytes)), "cudaMallocHost");
    check(cudaMalloc(reinterpret_cast<void**>(&device_), static_cast<size_t>(bytes)), "cudaMalloc");
    bytes_ = bytes;
  }
  char* host() const { return host_; }
  char* device() const { return device_; }

  /// The work queued on the stream is the last to use it.
  void used_by(cudaStream_t stream) { check(cudaEventRecord(used_, stream), "recording an event"); }
  bool idle() const { return cudaEventQuery(used_) == cudaSuccess; }

 private:
  void release() {
    if (host_ != nullptr) cudaFreeHost(host_);
    if (device_ != nullptr) cudaFree(device_);
    host_ = device_ = nullptr;
    bytes_ = 0;
  }
  char* host_ = nullptr;
  char* device_ = nullptr;
  int64_t bytes_ = 0;
  cudaEvent_t used_ = nullptr;
};

/// A buffer that no call under way uses; a new one where all are in use.
inline ValueStaging& idle_staging(std::vector<std::unique_ptr<ValueStaging>>& all) {
  for (const auto& one : all) {
    if (one->idle()) return *one;
  }
  return *all.emplace_back(std::make_unique<ValueStaging>());
}

}  // namespace mimo::cuda
