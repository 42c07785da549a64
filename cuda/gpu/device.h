// The CUDA library's device: streams of the driver, a caching memory pool over cudaMalloc, and what operations need of
// the chip. Handles of vendor libraries hang on the device too and are made at their first use.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "mimo.h"

namespace mimo {
class MemoryPool;
}

namespace mimo::cuda {

class CublasLt;
class Cudnn;
class Staging;

}  // namespace mimo::cuda

struct mimo_device {
  explicit mimo_device(int32_t index);
  ~mimo_device();
  mimo_device(const mimo_device&) = delete;
  mimo_device& operator=(const mimo_device&) = delete;
  /// Makes this the calling thread's device; every entry point does.
  void use() const;
  mimo::cuda::CublasLt& cublaslt();
  mimo::cuda::Cudnn& cudnn();

  int32_t index;
  int32_t multiprocessors = 0;
  int32_t compute_major = 0, compute_minor = 0;
  int64_t shared_bytes_per_block = 0;  // what a kernel may ask for
  bool deterministic = false;
  /// The run has failed and its collectives were ended where they were: what they left in memory means nothing.
  bool communication_ended = false;  // read and written with __atomic_*
  /// Its own, as those below: plain pointers because kernel files include this, dozens of times, and parse no <memory>.
  mimo::MemoryPool* memory = nullptr;

 private:
  mimo::cuda::CublasLt* cublaslt_ = nullptr;
  mimo::cuda::Cudnn* cudnn_ = nullptr;
};

struct mimo_stream {
  explicit mimo_stream(mimo_device* device);
  ~mimo_stream();
  mimo_stream(const mimo_stream&) = delete;
  mimo_stream& operator=(const mimo_stream&) = delete;
  mimo_device* device;
  cudaStream_t handle = nullptr;
  mimo::cuda::Staging* const staging;
};

struct mimo_event {
  mimo_device* device;
  cudaEvent_t handle;
};

namespace mimo::cuda {

/// Temporary memory of one operation. Given back at the end of the scope, while kernels that use it may still be queued:
/// only later work of the same stream can get it.
class Workspace {
 public:
  Workspace(mimo_stream* stream, int64_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(address_);
  }

 private:
  mimo_stream* stream_;
  void* address_;
};

}  // namespace mimo::cuda
