// Devices, streams, events and memory of the CPU library. Every call is synchronous.
#include "device.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif
#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "image_versions.h"
#include "memory_pool.h"
#include "openblas.h"
#include "processor.h"
#include "status.h"

namespace mimo {
namespace {

class HostMemoryPool final : public MemoryPool {
 public:
  ~HostMemoryPool() override { release_all(); }

 protected:
  void* system_allocate(int64_t bytes) override {
    // Large blocks start on huge-page boundaries: fewer page faults and TLB misses on activations.
    constexpr int64_t huge_page = 2 << 20;
    const int64_t alignment = bytes >= huge_page ? huge_page : 64;
    void* address = std::aligned_alloc(static_cast<size_t>(alignment),
                                       static_cast<size_t>((bytes + alignment - 1) / alignment * alignment));
    if (address != nullptr && bytes >= huge_page) madvise(address, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    return address;
  }
  void system_free(void* address, int64_t bytes) override {
    mark_live(address, bytes, bytes);
    std::free(address);
  }
#ifdef __SANITIZE_ADDRESS__
  void mark_live(void* address, int64_t live, int64_t bytes) override {
    ASAN_UNPOISON_MEMORY_REGION(address, static_cast<size_t>(live));
    ASAN_POISON_MEMORY_REGION(static_cast<char*>(address) + live, static_cast<size_t>(bytes - live));
  }
#endif
};

int64_t now_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Workspace::Workspace(mimo_stream* stream, int64_t bytes)
    : stream_(stream), address_(stream->device->memory->allocate(stream, bytes, MIMO_TAG_WORKSPACE)) {}
Workspace::~Workspace() { stream_->device->memory->free(stream_, address_); }

}  // namespace mimo

mimo_device::mimo_device(int32_t thread_count) : threads(thread_count), memory(new mimo::HostMemoryPool()) {}
mimo_device::~mimo_device() { delete memory; }

using mimo::guard;

extern "C" {

const char* mimo_library_kind(void) { return "cpu"; }

const char* mimo_library_versions(void) {
  static const std::string line = mimo::openblas_version() + (", " + mimo::image_versions());
  return line.c_str();
}

int32_t mimo_device_count(int32_t* count) {
  *count = 1;
  return MIMO_OK;
}

int32_t mimo_device_open(int32_t index, int32_t threads, mimo_device** device) {
  return guard([&] {
    MIMO_REQUIRE(index == 0, "mimo_device_open");
    MIMO_REQUIRE(threads >= 0, "mimo_device_open");
    if (!mimo::processor_has_avx2()) {
      throw mimo::Error(MIMO_ERROR_UNSUPPORTED,
                        "This processor (" + mimo::processor_name() + ") has no AVX2 and FMA, which the CPU library needs.");
    }
    *device = new mimo_device(threads);
  });
}

int32_t mimo_device_close(mimo_device* device) {
  return guard([&] { delete device; });
}

int32_t mimo_device_describe(mimo_device* device, mimo_device_info* info) {
  return guard([&] {
    std::memset(info, 0, sizeof(*info));
    std::strncpy(info->name, mimo::processor_name().c_str(), sizeof(info->name) - 1);
    std::strncpy(info->instructions, mimo::processor_has_avx512() ? "avx512" : "avx2", sizeof(info->instructions) - 1);
    struct sysinfo system {};
    if (sysinfo(&system) == 0) info->memory_bytes = static_cast<int64_t>(system.totalram) * system.mem_unit;
    info->threads = device->threads.size();
    info->device_count = 1;
  });
}

int32_t mimo_device_set_deterministic(mimo_device*, int32_t) { return MIMO_OK; }

int32_t mimo_device_set_algorithms(mimo_device*, const char*) { return MIMO_OK; }

int32_t mimo_device_time_algorithms(mimo_device*, mimo_stream*, int32_t* left_out) {
  *left_out = 0;
  return MIMO_OK;
}

int32_t mimo_device_timed_algorithms(mimo_device*, char*, int64_t, int64_t* bytes) {
  *bytes = 0;
  return MIMO_OK;
}

int32_t mimo_stream_create(mimo_device* device, int32_t, mimo_stream** stream) {
  return guard([&] { *stream = new mimo_stream{device}; });
}

int32_t mimo_stream_destroy(mimo_stream* stream) {
  return guard([&] { delete stream; });
}

int32_t mimo_stream_synchronize(mimo_stream*) { return MIMO_OK; }

int32_t mimo_stream_set_graphs(mimo_stream*, int32_t wanted) {
  return guard([&] {
    if (wanted != 0) throw mimo::Error(MIMO_ERROR_UNSUPPORTED, "The CPU library has no graphs.");
  });
}

int32_t mimo_stream_graph_statistics(mimo_stream*, mimo_graph_statistics* statistics) {
  *statistics = {};
  return MIMO_OK;
}

int32_t mimo_event_create(mimo_device*, mimo_event** event) {
  return guard([&] { *event = new mimo_event(); });
}

int32_t mimo_event_destroy(mimo_event* event) {
  return guard([&] { delete event; });
}

int32_t mimo_event_record(mimo_event* event, mimo_stream*) {
  event->nanoseconds = mimo::now_nanoseconds();
  return MIMO_OK;
}

int32_t mimo_stream_wait_event(mimo_stream*, mimo_event*) { return MIMO_OK; }
int32_t mimo_event_synchronize(mimo_event*) { return MIMO_OK; }

int32_t mimo_event_elapsed(mimo_event* start, mimo_event* end, float* milliseconds) {
  *milliseconds = static_cast<float>(end->nanoseconds - start->nanoseconds) * 1e-6f;
  return MIMO_OK;
}

int32_t mimo_memory_allocate(mimo_stream* stream, int64_t bytes, int32_t tag, void** address) {
  return guard([&] { *address = stream->device->memory->allocate(stream, bytes, tag); });
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
  return guard([&] { device->memory->trim(); });
}

int32_t mimo_memory_limit(mimo_device* device, int64_t bytes) {
  return guard([&] { device->memory->set_limit(bytes); });
}

int32_t mimo_memory_copy(mimo_stream* stream, void* destination, const void* source, int64_t bytes) {
  return guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_memory_copy");
    if (bytes == 0) return;
    constexpr int64_t grain = 1 << 20;  // one core does not use all of the memory's bandwidth
    char* to = static_cast<char*>(destination);
    const char* from = static_cast<const char*>(source);
    const bool overlap = to < from + bytes && from < to + bytes;
    mimo::parallel_range(stream->device->threads, bytes, overlap ? bytes : grain, [&](int64_t begin, int64_t end) {
      std::memmove(to + begin, from + begin, static_cast<size_t>(end - begin));
    });
  });
}

int32_t mimo_memory_copy_to_device(mimo_stream* stream, void* destination, const void* source, int64_t bytes) {
  return mimo_memory_copy(stream, destination, source, bytes);
}

int32_t mimo_memory_copy_to_host(mimo_stream* stream, void* destination, const void* source, int64_t bytes) {
  return mimo_memory_copy(stream, destination, source, bytes);
}

int32_t mimo_host_allocate(mimo_device*, int64_t bytes, void** address) {
  return guard([&] {
    MIMO_REQUIRE(bytes > 0, "mimo_host_allocate");
    *address = std::malloc(static_cast<size_t>(bytes));
    if (*address == nullptr) {
      throw mimo::Error(MIMO_ERROR_OUT_OF_MEMORY, "The host has no memory for " + std::to_string(bytes) + " bytes.");
    }
  });
}

int32_t mimo_host_free(mimo_device*, void* address) {
  return guard([&] { std::free(address); });
}

int32_t mimo_host_copy(mimo_stream* stream, void* destination, const void* source, int64_t bytes) {
  return mimo_memory_copy(stream, destination, source, bytes);
}

int32_t mimo_memory_set_zero(mimo_stream*, void* destination, int64_t bytes) {
  return guard([&] {
    MIMO_REQUIRE(bytes >= 0, "mimo_memory_set_zero");
    if (bytes > 0) std::memset(destination, 0, static_cast<size_t>(bytes));
  });
}

}  // extern "C"
