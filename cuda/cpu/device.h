// The CPU library's device: a pool of worker threads, a memory pool, and streams that execute synchronously.
#pragma once
#include <cstdint>

#include "mimo.h"
#include "thread_pool.h"

namespace mimo {
class MemoryPool;
}

struct mimo_device {
  explicit mimo_device(int32_t threads);
  ~mimo_device();
  mimo_device(const mimo_device&) = delete;
  mimo_device& operator=(const mimo_device&) = delete;
  mimo::ThreadPool threads;
  /// Owned. A plain pointer because dozens of kernel files include this header and should not parse <memory>.
  mimo::MemoryPool* const memory;
};

struct mimo_stream {
  mimo_device* device;
};

struct mimo_event {
  int64_t nanoseconds = 0;
};

namespace mimo {

/// Temporary memory of one operation, freed at the end of the scope.
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

}  // namespace mimo
