// The CUDA library's device: streams of the driver, a caching memory pool over cudaMalloc, and what operations need of
// the chip. Handles of vendor libraries hang on the device too and are made at their first use.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "memory_pool.h"
#include "mimo.h"

namespace mimo::cuda {

class CublasLt;
class Cudnn;

/// Pinned host memory through which a stream's copies from and to pageable memory pass, so that they run at the bus's
/// rate, and those to the device without waiting for the stream.
class Staging {
 public:
  ~Staging();
  /// Returns when `source` may change: what still has to be copied of it lies here. Waits for the stream's earlier work only
  /// where more than most_pieces are on their way.
  void to_device(cudaStream_t stream, void* destination, const void* source, int64_t bytes);
  /// Returns when the copy is complete.
  void to_host(cudaStream_t stream, void* destination, const void* source, int64_t bytes);

 private:
  struct Piece {
    char* memory = nullptr;
    cudaEvent_t free = nullptr;  // the last copy through it is done
  };
  static constexpr int64_t piece_bytes = 8 << 20;
  static constexpr size_t most_pieces = 16;
  void add_piece();
  void next_piece();
  std::vector<Piece> pieces_;
  size_t current_ = 0;
  int64_t filled_ = piece_bytes;  // bytes of the current piece
};

}  // namespace mimo::cuda

struct mimo_device {
  explicit mimo_device(int32_t index);
  ~mimo_device();
  /// Makes this the calling thread's device; every entry point does.
  void use() const;
  mimo::cuda::CublasLt& cublaslt();
  mimo::cuda::Cudnn& cudnn();

  int32_t index;
  int32_t multiprocessors = 0;
  int32_t compute_major = 0, compute_minor = 0;
  int64_t shared_bytes_per_block = 0;  // what a kernel may ask for
  bool deterministic = false;
  std::unique_ptr<mimo::MemoryPool> memory;

 private:
  std::unique_ptr<mimo::cuda::CublasLt> cublaslt_;
  std::unique_ptr<mimo::cuda::Cudnn> cudnn_;
};

struct mimo_stream {
  mimo_device* device;
  cudaStream_t handle;
  mimo::cuda::Staging staging;
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
  Workspace(mimo_stream* stream, int64_t bytes)
      : stream_(stream), address_(stream->device->memory->allocate(stream, bytes, MIMO_TAG_WORKSPACE)) {}
  ~Workspace() { stream_->device->memory->free(stream_, address_); }
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
