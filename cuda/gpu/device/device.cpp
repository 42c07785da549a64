// Devices, streams, events and memory of the CUDA library.
#include "device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "algorithms.h"
#include "cublaslt.h"
#include "cudnn_attention.h"
#include "error.h"
#include "memory_pool.h"
#include "staging.h"
#include "status.h"

namespace mimo::cuda {

void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  const int32_t status = result == cudaErrorMemoryAllocation ? MIMO_ERROR_OUT_OF_MEMORY : MIMO_ERROR_DEVICE;
  throw Error(status, std::string("CUDA failed at ") + what + ": " + cudaGetErrorString(result) + " (" +
                          cudaGetErrorName(result) + ").");
}

namespace {

class DeviceMemoryPool final : public MemoryPool {
 public:
  explicit DeviceMemoryPool(int32_t index) : index_(index) {}
  ~DeviceMemoryPool() override {
    cudaSetDevice(index_);
    release_all();
  }

 protected:
  void* system_allocate(int64_t bytes) override {
    void* address = nullptr;
    const cudaError_t result = cudaMalloc(&address, static_cast<size_t>(bytes));
    if (result == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // not a sticky error: the pool trims and retries
      return nullptr;
    }
    check(result, "cudaMalloc");
    return address;
  }
  // cudaFree synchronises the device, so no queued work still uses the block.
  void system_free(void* address, int64_t) override { cudaFree(address); }

 private:
  int32_t index_;
};

}  // namespace

Workspace::Workspace(mimo_stream* stream, int64_t bytes)
    : device_(stream->device),
      key_(stream->workspace_key()),
      address_(device_->memory->allocate(key_, bytes, MIMO_TAG_WORKSPACE)) {}
Workspace::~Workspace() { device_->memory->free(key_, address_); }

}  // namespace mimo::cuda

using mimo::guard;
using mimo::cuda::check;

mimo_device::mimo_device(int32_t device_index) : index(device_index), algorithms_(new mimo::cuda::Algorithms()) {
  use();
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, name, index), "reading the device's properties");
    return value;
  };
  multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  compute_major = attribute(cudaDevAttrComputeCapabilityMajor);
  compute_minor = attribute(cudaDevAttrComputeCapabilityMinor);
  shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (compute_major < 8) {
    throw mimo::Error(MIMO_ERROR_UNSUPPORTED, "This GPU has compute capability " + std::to_string(compute_major) + "." +
                                                  std::to_string(compute_minor) + "; mimo needs 8.0 or later.");
  }
  memory = new mimo::cuda::DeviceMemoryPool(device_index);
}

mimo_device::~mimo_device() {
  delete cudnn_;
  delete cublaslt_;
  delete algorithms_;
  delete memory;
}

void mimo_device::use() const {
  thread_local int32_t current = -1;
  if (current == index) return;
  check(cudaSetDevice(index), "choosing the device");
  current = index;
}

mimo::cuda::CublasLt& mimo_device::cublaslt() {
  if (cublaslt_ == nullptr) cublaslt_ = new mimo::cuda::CublasLt(*algorithms_, multiprocessors);
  return *cublaslt_;
}

mimo::cuda::Cudnn& mimo_device::cudnn() {
  if (cudnn_ == nullptr) cudnn_ = new mimo::cuda::Cudnn(*algorithms_);
  return *cudnn_;
}

void mimo_device::set_algorithms(const char* choices) {
  algorithms_->set(choices);
  if (cublaslt_ != nullptr) cublaslt_->forget_plans();
  if (cudnn_ != nullptr) cudnn_->forget_plans();
}

int32_t mimo_device::time_algorithms(mimo_stream& stream) {
  return (cublaslt_ != nullptr ? cublaslt_->time_algorithms(stream) : 0) +
         (cudnn_ != nullptr ? cudnn_->time_algorithms(stream) : 0);
}

namespace {

/// Arguments of the two functions below.
struct Span {
  void* destination;
  const void* source;
  int64_t bytes;
};

void copy(mimo_stream& stream, const void* arguments) {
  const Span& span = *static_cast<const Span*>(arguments);
  check(cudaMemcpyAsync(span.destination, span.source, static_cast<size_t>(span.bytes), cudaMemcpyDeviceToDevice,
                        stream.handle()),
        "a copy on the device");
}

void clear(mimo_stream& stream, const void* arguments) {
  const Span& span = *static_cast<const Span*>(arguments);
  check(cudaMemsetAsync(span.destination, 0, static_cast<size_t>(span.bytes), stream.handle()), "clearing memory");
}

/// The first call of the driver, which reads this variable at start-up. By default streams share 8 hardware queues, and
/// a stream whose kernel waits for another rank then blocks the streams behind it. A value set by the user is kept.
cudaError_t count_devices(int* count) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  return cudaGetDeviceCount(count);
}

}  // namespace

extern "C" {

const char* mimo_library_kind(void) { return "cuda"; }

int32_t mimo_device_count(int32_t* count) {
  if (count_devices(count) != cudaSuccess) *count = 0;
  return MIMO_OK;
}

int32_t mimo_device_open(int32_t index, int32_t, mimo_device** device) {
  return guard([&] {
    int count = 0;
    const cudaError_t found = count_devices(&count);
    if (found == cudaErrorInsufficientDriver) {
      throw mimo::Error(MIMO_ERROR_UNSUPPORTED,
                        "The NVIDIA driver is older than this library's CUDA 13.0 needs: install driver 580 or later.");
    }
    if (found == cudaErrorNoDevice || count == 0) {
      throw mimo::Error(MIMO_ERROR_UNSUPPORTED, "This machine has no NVIDIA GPU that CUDA can use.");
    }
    check(found, "looking for devices");
    if (index < 0 || index >= count) {
      throw mimo::Error(MIMO_ERROR_ARGUMENT, "There is no CUDA device " + std::to_string(index) + ": this process sees " +
                                                 std::to_string(count) + ".");
    }
    *device = new mimo_device(index);
  });
}

int32_t mimo_device_close(mimo_device* device) {
  return guard([&] {
    device->use();
    delete device;
  });
}

int32_t mimo_device_describe(mimo_device* device, mimo_device_info* info) {
  return guard([&] {
    std::memset(info, 0, sizeof(*info));
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device->index), "reading the device's properties");
    std::snprintf(info->name, sizeof(info->name), "%.*s", static_cast<int>(sizeof(info->name)) - 1, properties.name);
    std::snprintf(info->instructions, sizeof(info->instructions), "sm_%d%d", properties.major, properties.minor);
    info->memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    info->threads = properties.multiProcessorCount;
    int count = 0;
    check(cudaGetDeviceCount(&count), "looking for devices");
    info->device_count = count;
  });
}

int32_t mimo_device_set_deterministic(mimo_device* device, int32_t deterministic) {
  device->deterministic = deterministic != 0;
  return MIMO_OK;
}

int32_t mimo_event_create(mimo_device* device, mimo_event** event) {
  return guard([&] {
    device->use();
    auto made = std::make_unique<mimo_event>();
    made->device = device;
    check(cudaEventCreate(&made->handle), "creating an event");
    *event = made.release();
  });
}

int32_t mimo_event_destroy(mimo_event* event) {
  return guard([&] {
    event->device->use();
    check(cudaEventDestroy(event->handle), "destroying an event");
    delete event;
  });
}

int32_t mimo_event_record(mimo_event* event, mimo_stream* stream) {
  return guard([&] {
    event->device->use();
    check(cudaEventRecord(event->handle, stream->handle()), "recording an event");
  });
}

int32_t mimo_stream_wait_event(mimo_stream* stream, mimo_event* event) {
  return guard([&] {
    stream->device->use();
    check(cudaStreamWaitEvent(stream->handle(), event->handle, 0), "waiting for an event");
  });
}

int32_t mimo_event_synchronize(mimo_event* event) {
  return guard([&] {
    event->device->use();
    check(cudaEventSynchronize(event->handle), "work before an event");
  });
}

int32_t mimo_event_elapsed(mimo_event* start, mimo_event* end, float* milliseconds) {
  return guard([&] { check(cudaEventElapsedTime(milliseconds, start->handle, end->handle), "timing two events"); });
}

int32_t mimo_memory_allocate(mimo_stream* stream, int64_t bytes, int32_t tag, void** address) {
  return guard([&] {
    stream->device->use();
    *address = stream->device->memory->allocate(stream, bytes, tag);
  });
}

int32_t mimo_memory_free(mimo_stream* stream, void* address) {
  return guard([&] { stream->device->memory->free(stream, address); });
}

int32_t mimo_memory_statistics_get(mimo_device* device, mimo_memory_statistics* statistics) {
  return guard([&] { device->memory->statistics(statistics); });
}

int32_t mimo_memory_reset_peak(mimo_device* device) {
  return guard([&] { device->memory->reset_peak(); });
}

int32_t mimo_memory_trim(mimo_device* device) {
  return guard([&] {
    device->use();
    device->memory->trim();
  });
}

int32_t mimo_memory_limit(mimo_device* device, int64_t bytes) {
  return guard([&] { device->memory->set_limit(bytes); });
}

int32_t mimo_memory_copy(mimo_stream* stream, void* destination, const void* source, int64_t bytes) {
  return guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_memory_copy");
    if (bytes == 0) return;
    stream->device->use();
    const Span span{destination, source, bytes};
    stream->run(copy, &span, sizeof(span));
  });
}

int32_t mimo_memory_copy_to_device(mimo_stream* stream, void* destination, const void* source, int64_t bytes) {
  return guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_memory_copy_to_device");
    if (bytes == 0) return;
    stream->device->use();
    stream->staging->to_device(stream->handle(), destination, source, bytes);
  });
}

int32_t mimo_memory_copy_to_host(mimo_stream* stream, void* destination, const void* source, int64_t bytes) {
  return guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_memory_copy_to_host");
    if (bytes == 0) return;
    stream->device->use();
    stream->staging->to_host(stream->handle(), destination, source, bytes);
    if (__atomic_load_n(&stream->device->communication_ended, __ATOMIC_ACQUIRE)) {
      throw mimo::Error(MIMO_ERROR_PEER, "The run has failed: its communication was ended.");
    }
  });
}

int32_t mimo_host_allocate(mimo_device* device, int64_t bytes, void** address) {
  return guard([&] {
    MIMO_REQUIRE(bytes > 0, "mimo_host_allocate");
    device->use();
    const cudaError_t result = cudaMallocHost(address, static_cast<size_t>(bytes));
    if (result == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // not a sticky error
      throw mimo::Error(MIMO_ERROR_OUT_OF_MEMORY,
                        "The host has no page-locked memory for " + std::to_string(bytes) + " bytes.");
    }
    check(result, "cudaMallocHost");
  });
}

int32_t mimo_host_free(mimo_device* device, void* address) {
  return guard([&] {
    device->use();
    check(cudaFreeHost(address), "cudaFreeHost");
  });
}

int32_t mimo_host_copy(mimo_stream* stream, void* destination, const void* source, int64_t bytes) {
  return guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_host_copy");
    stream->device->use();
    check(cudaMemcpyAsync(destination, source, static_cast<size_t>(bytes), cudaMemcpyDefault, stream->handle()),
          "a copy beside the device's work");
  });
}

int32_t mimo_memory_set_zero(mimo_stream* stream, void* destination, int64_t bytes) {
  return guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_memory_set_zero");
    if (bytes == 0) return;
    stream->device->use();
    const Span span{destination, nullptr, bytes};
    stream->run(clear, &span, sizeof(span));
  });
}

}  // extern "C"
