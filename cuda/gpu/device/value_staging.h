// Buffers through which host values go to a GPU and back.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "error.h"

namespace mimo::cuda {

/// Grows to the largest size requested.
class ValueStaging {
 public:
  ValueStaging() { check(cudaEventCreateWithFlags(&used_, cudaEventDisableTiming), "creating an event"); }
  ~ValueStaging() {
    release();
    cudaEventDestroy(used_);
  }
  ValueStaging(const ValueStaging&) = delete;
  ValueStaging& operator=(const ValueStaging&) = delete;

  /// Ensures capacity on the current device. Previous content is lost.
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

  /// Marks the buffer as in use until the work queued on the stream so far is done.
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

/// Returns a buffer that no pending call uses, creating one if all are in use.
inline ValueStaging& idle_staging(std::vector<std::unique_ptr<ValueStaging>>& all) {
  for (const auto& one : all) {
    if (one->idle()) return *one;
  }
  return *all.emplace_back(std::make_unique<ValueStaging>());
}

}  // namespace mimo::cuda
