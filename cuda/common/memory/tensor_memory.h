// Access of collectives to tensor memory: the process's own, or a GPU's through copies.
#pragma once
#include <cstdint>

namespace mimo {

class TensorMemory {
 public:
  virtual ~TensorMemory() = default;
  /// Whether tensors are host memory, which may be read and written in place.
  virtual bool in_host() const = 0;
  // Copies in order, complete after settle(). With 0 bytes the addresses are ignored.
  virtual void fetch(char* host, const char* tensor, int64_t bytes) = 0;
  virtual void store(char* tensor, const char* host, int64_t bytes) = 0;
  /// Copies between tensors; the ranges may overlap.
  virtual void move(char* to, const char* from, int64_t bytes) = 0;
  virtual void settle() = 0;
  /// At most a slot's bytes in host memory: the tensor itself, or a copy valid until the next call.
  virtual const char* hold(const char* tensor, int64_t bytes) = 0;
  /// Host memory whose content store() then copies to the tensor: the tensor itself, or the memory that hold()
  /// returned.
  virtual char* room(char* tensor) = 0;
};

/// The process's own memory.
TensorMemory& host_memory();

}  // namespace mimo
