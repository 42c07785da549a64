// The CUDA library's device: driver streams, a caching memory pool over cudaMalloc, and the chip properties that
// operations need. Vendor library handles belong to the device and are created at first use.
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
  /// Makes this the calling thread's current device; every entry point calls it.
  void use() const;
  mimo::cuda::CublasLt& cublaslt();
  mimo::cuda::Cudnn& cudnn();
  const mimo::cuda::Algorithms& algorithms() const { return *algorithms_; }
  /// mimo_device_set_algorithms.
  void set_algorithms(const char* choices);
  /// mimo_device_time_algorithms: returns how many could not be timed for lack of memory.
  int32_t time_algorithms(mimo_stream& stream);

  int32_t index;
  int32_t multiprocessors = 0;
  int32_t compute_major = 0, compute_minor = 0;
  int64_t shared_bytes_per_block = 0;  // opt-in maximum for a kernel
  bool deterministic = false;
  /// Set when the run has failed and its collectives were aborted: the memory that they wrote is undefined.
  bool communication_ended = false;  // read and written with __atomic_*
  /// Owned, as the pointers below. Plain pointers because dozens of kernel files include this header and should not
  /// parse <memory>.
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
  /// The driver's stream, to queue work on; flushes operations held back for a graph first.
  cudaStream_t handle() {
    if (queue_ != nullptr) flush();
    return handle_;
  }
  /// Queues an operation, or holds it back for a graph. `function` may depend only on its arguments and on device
  /// memory.
  void run(void (*function)(mimo_stream&, const void*), const void* arguments, int64_t bytes);
  void flush();
  /// Turns CUDA graphs for repeated runs of operations on or off; drops earlier recordings.
  void set_graphs(bool wanted);
  mimo_graph_statistics graph_statistics() const;
  /// Key of the pool's cache from which an operation's workspace is allocated.
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

/// Temporary memory of one operation. Freed at the end of the scope although kernels that use it may still be queued:
/// the pool gives it only to later work of the same stream.
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
