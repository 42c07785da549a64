// The CPU library's device: a pool of worker threads, a memory pool, and streams that run everything at once.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "memory_pool.h"
#include "mimo.h"
#include "thread_pool.h"

struct mimo_device {
  explicit mimo_device(int32_t threads);
  mimo::ThreadPool threads;
  std::unique_ptr<mimo::MemoryPool> memory;
};

struct mimo_stream {
  mimo_device* device;
};

struct mimo_event {
  int64_t nanoseconds = 0;
};

namespace mimo {

/// Temporary memory of one operation, given back at the end of the scope.
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

}  // namespace mimo
