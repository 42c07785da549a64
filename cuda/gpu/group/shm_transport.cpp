// The CPU library's collectives applied to GPU tensors: a rank copies its values into its slots of the host's shared
// memory and copies values from the others' slots to its GPU. Reductions run on the CPU in rank order.
//
// Starting a call waits for the stream's work, and waiting for a call waits for its copies: the host is never ahead.
// That is slow, but needs no peer access, and ranks may share GPUs. Each group pins one slot, at most 256 KiB.
#include "collective.h"
#include "error.h"
#include "processor.h"
#include "status.h"
#include "transport.h"

namespace mimo::cuda {
namespace {

/// A GPU's memory. The group ensures that only one thread uses it at a time.
class DeviceMemory final : public TensorMemory {
 public:
  ~DeviceMemory() override {
    if (queue_ == nullptr) return;
    cudaSetDevice(device_);
    cudaStreamDestroy(queue_);
    cudaFreeHost(held_);
  }

  /// Called before the first use; `held_bytes`: maximum size passed to hold().
  void open(int32_t device, int64_t held_bytes) {
    if (queue_ != nullptr) return;
    device_ = device;
    check(cudaMallocHost(reinterpret_cast<void**>(&held_), static_cast<size_t>(held_bytes)), "cudaMallocHost");
    check(cudaStreamCreateWithFlags(&queue_, cudaStreamNonBlocking), "creating a stream");
  }

  bool in_host() const override { return false; }
  void fetch(char* host, const char* tensor, int64_t bytes) override { copy(host, tensor, bytes, cudaMemcpyDeviceToHost); }
  void store(char* tensor, const char* host, int64_t bytes) override { copy(tensor, host, bytes, cudaMemcpyHostToDevice); }
  void move(char* to, const char* from, int64_t bytes) override { copy(to, from, bytes, cudaMemcpyDeviceToDevice); }
  void settle() override {
    if (!queued_) return;
    check(cudaStreamSynchronize(queue_), "a copy between a GPU and shared memory");
    queued_ = false;
  }
  const char* hold(const char* tensor, int64_t bytes) override {
    fetch(held_, tensor, bytes);
    settle();
    return held_;
  }
  char* room(char*) override { return held_; }

 private:
  void copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
    if (bytes <= 0) return;
    // The group's own thread calls this too.
    check(cudaSetDevice(device_), "choosing a device");
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, queue_), "a copy between a GPU and shared memory");
    queued_ = true;
  }

  int32_t device_ = -1;
  cudaStream_t queue_ = nullptr;
  char* held_ = nullptr;
  bool queued_ = false;
};

class ShmTransport final : public Transport {
 public:
  ShmTransport(Run& run, const std::string& name, std::vector<int32_t> ranks)
      : group_(run, name, std::move(ranks), memory_) {
    // The reductions are compiled for AVX2.
    if (!processor_has_avx2()) {
      throw Error(MIMO_ERROR_UNSUPPORTED,
                  "The shm backend adds on the processor, and " + processor_name() + " has no AVX2, FMA and BMI2.");
    }
  }

  int32_t size() const override { return group_.size(); }
  void barrier() override { mimo::barrier(group_); }
  void exchange(const void* x, void* y, int64_t bytes) override { mimo::exchange(group_, x, y, bytes); }

  int64_t all_reduce(mimo_stream& stream, void* x, int64_t elements, int32_t dtype, int32_t reduction) override {
    return start(stream, Group::collectives, make_all_reduce(group_, x, elements, dtype, reduction));
  }
  int64_t reduce_scatter(mimo_stream& stream, const void* x, void* y, int64_t elements, int32_t dtype) override {
    return start(stream, Group::collectives, make_reduce_scatter(group_, x, y, elements, dtype));
  }
  int64_t all_gather(mimo_stream& stream, const void* x, void* y, int64_t bytes) override {
    return start(stream, Group::collectives, make_all_gather(group_, x, y, bytes, MIMO_COLLECTIVE_ALL_GATHER));
  }
  int64_t broadcast(mimo_stream& stream, void* x, int64_t bytes, int32_t root) override {
    return start(stream, Group::collectives, make_broadcast(group_, x, bytes, root));
  }
  int64_t all_to_all(mimo_stream& stream, const void* x, void* y, const int32_t* rows, int64_t row_bytes) override {
    return start(stream, Group::collectives, make_all_to_all(group_, x, y, rows, row_bytes));
  }
  int64_t exchange_rows(mimo_stream& stream, const mimo_row_exchange& rows, const int32_t*) override {
    return start(stream, Group::collectives, make_exchange_rows(group_, rows));
  }
  int32_t row_transport() override { return MIMO_ROW_TRANSPORT_HOST; }
  int64_t send(mimo_stream& stream, const void* x, int64_t bytes, int32_t to) override {
    return start(stream, group_.lane_to(to), make_send(group_, x, bytes, to));
  }
  int64_t receive(mimo_stream& stream, void* x, int64_t bytes, int32_t from) override {
    return start(stream, group_.lane_from(from), make_receive(group_, x, bytes, from));
  }
  /// On return the result is in GPU memory.
  void wait(mimo_stream&, int64_t ticket) override { group_.wait(ticket); }

 private:
  int64_t start(mimo_stream& stream, int32_t lane, std::unique_ptr<Call> call) {
    memory_.open(stream.device->index, group_.slot_bytes());
    check(cudaStreamSynchronize(stream.handle()), "work before a collective");
    return group_.start(lane, std::move(call));
  }

  DeviceMemory memory_;
  Group group_;
};

}  // namespace

std::unique_ptr<Transport> shm_transport(Run& run, const std::string& name, std::vector<int32_t> ranks) {
  return std::make_unique<ShmTransport>(run, name, std::move(ranks));
}

}  // namespace mimo::cuda
