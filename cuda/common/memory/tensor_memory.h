// How collectives reach the memory of tensors: the process's own, or a GPU's, which has to pass through it.
#pragma once
#include <cstdint>

namespace mimo {

class TensorMemory {
 public:
  virtual ~TensorMemory() = default;
  /// Tensors are host memory: they may be read and written in place.
  virtual bool in_host() const = 0;
  // Copies, one after the other, done when settle() returns. Of 0 bytes the addresses do not matter.
  virtual void fetch(char* host, const char* tensor, int64_t bytes) = 0;
  virtual void store(char* tensor, const char* host, int64_t bytes) = 0;
  /// From tensor to tensor, which may overlap.
  virtual void move(char* to, const char* from, int64_t bytes) = 0;
  virtual void settle() = 0;
  /// These bytes, at most a slot's, in host memory: the tensor itself, or a copy that lasts until the next call.
  virtual const char* hold(const char* tensor, int64_t bytes) = 0;
  /// Host memory whose content store() then brings into the tensor: the tensor itself, or the memory that hold()
  /// returned.
  virtual char* room(char* tensor) = 0;
};

/// The process's own memory.
TensorMemory& host_memory();

}  // namespace mimo
