#include "tensor_memory.h"

#include <cstring>

namespace mimo {
namespace {

class HostMemory final : public TensorMemory {
 public:
  bool in_host() const override { return true; }
  void fetch(char* host, const char* tensor, int64_t bytes) override { copy(host, tensor, bytes); }
  void store(char* tensor, const char* host, int64_t bytes) override { copy(tensor, host, bytes); }
  void move(char* to, const char* from, int64_t bytes) override {
    if (bytes > 0) std::memmove(to, from, static_cast<size_t>(bytes));
  }
  void settle() override {}
  const char* hold(const char* tensor, int64_t) override { return tensor; }
  char* room(char* tensor) override { return tensor; }

 private:
  static void copy(char* to, const char* from, int64_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
};

}  // namespace

TensorMemory& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace mimo
