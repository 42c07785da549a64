// The CUDA library's device: streams of the driver, a caching memory pool over cudaMalloc, and properties of the chip
// that operations need. Handles of vendor libraries hang on the device too and are made at their first use.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "mimo.h"

namespace mimo {
class MemoryPool;
class OperationQueue;
}

namespace mimo::cuda {

class Algorithms;
class CublasLt;
class Cudnn;
class GraphRecorder;
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
  const mimo::cuda::Algorithms& algorithms() const { return *algorithms_; }
  /// mimo_device_set_algorithms.
  void set_algorithms(const char* choices);
  /// mimo_device_time_algorithms: returns how many there was no memory for.
  int32_t time_algorithms(mimo_stream& stream);

  int32_t index;
  int32_t multiprocessors = 0;
  int32_t compute_major = 0, compute_minor = 0;
  int64_t shared_bytes_per_block = 0;  // the most that a kernel may ask for
  bool deterministic = false;
  /// The run has failed and its collectives were ended midway: the memory they left behind is meaningless.
  bool communication_ended = false;  // read and written with __atomic_*
  /// Its own, as those below: plain pointers because kernel files include this, dozens of times, and parse no <memory>.
  mimo::MemoryPool* memory = nullptr;

 private:
  mimo::cuda::Algorithms* const algorithms_;
  mimo::cuda::CublasLt* cublaslt_ = nullptr;
  mimo::cuda::Cudnn* cudnn_ = nullptr;
};

struct mimo_stream {
  mimo_stream(mimo_device* device, int32_t priority);
  ~mimo_stream();
  mimo_stream(const mimo_stream&) = delete;
  mimo_stream& operator=(const mimo_stream&) = delete;
  /// The driver's stream, for queueing work: operations held back for a graph are queued first.
  cudaStream_t handle() {
    if (queue_ != nullptr) flush();
    return handle_;
  }
  /// Queues an operation, or holds it back for a graph. `function` may depend on its arguments and device memory alone.
  void run(void (*function)(mimo_stream&, const void*), const void* arguments, int64_t bytes);
  void flush();
  /// Whether equal runs of operations are launched as CUDA graphs from now on; earlier recordings are dropped.
  void set_graphs(bool wanted);
  mimo_graph_statistics graph_statistics() const;
  /// The cache of the pool that an operation's temporary memory comes from.
  const void* workspace_key() const;

  mimo_device* device;
  mimo::cuda::Staging* const staging;

 private:
  cudaStream_t handle_ = nullptr;
  mimo::cuda::GraphRecorder* recorder_ = nullptr;
  mimo::OperationQueue* queue_ = nullptr;
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
  mimo_device* device_;
  const void* key_;
  void* address_;
};

}  // namespace mimo::cuda
