// Memory through which host values go to a GPU and come back: as large as the largest asked for so far.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "error.h"

namespace mimo::cuda {

class ValueStaging {
 public:
  ValueStaging() = default;
  ~ValueStaging() { release(); }
  ValueStaging(const ValueStaging&) = delete;
  ValueStaging& operator=(const ValueStaging&) = delete;

  /// On the current device. What it held is lost.
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
};

}  // namespace mimo::cuda
