#include "algorithms.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

#include "error.h"
#include "occupy.h"
#include "operations.h"
#include "status.h"

namespace mimo::cuda {
namespace {

constexpr float sample_microseconds = 1000;
constexpr int rounds = 9;
/// Candidates slower than this factor of the fastest are dropped after the first round.
constexpr float worth_another_round = 1.15f;
/// The library's first answer is kept unless another candidate takes less than this fraction of its time.
constexpr float clearly_faster = 0.99f;

/// Measures the time between two events of a stream.
class Stopwatch {
 public:
  explicit Stopwatch(mimo_stream& stream) : stream_(stream) {
    for (cudaEvent_t& event : events_) check(cudaEventCreate(&event), "creating an event");
  }
  ~Stopwatch() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  /// Microseconds of one call, averaged over `calls` calls.
  float sample(const Candidate& candidate, int64_t calls) {
    check(cudaEventRecord(events_[0], stream_.handle()), "recording an event");
    for (int64_t call = 0; call < calls; ++call) candidate(call);
    check(cudaEventRecord(events_[1], stream_.handle()), "recording an event");
    check(cudaEventSynchronize(events_[1]), "timing algorithms");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]), "timing algorithms");
    return milliseconds * 1000 / static_cast<float>(calls);
  }

 private:
  mimo_stream& stream_;
  cudaEvent_t events_[2]{};
};

float median(std::vector<float> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

void add_values(std::string& text, const char* name, std::initializer_list<int64_t> values) {
  text.append(" ").append(name);
  for (const int64_t value : values) text.append(" ").append(std::to_string(value));
}

void Algorithms::set(const std::string& lines) {
  chosen_.clear();
  std::istringstream text(lines);
  for (std::string line; std::getline(text, line);) {
    const size_t tab = line.find('\t');
    if (tab == std::string::npos) throw Error(MIMO_ERROR_ARGUMENT, "A chosen algorithm has no tab: " + line);
    chosen_[line.substr(0, tab)] = line.substr(tab + 1, line.find('\t', tab + 1) - tab - 1);
  }
}

const std::string* Algorithms::find(const std::string& what) const {
  const auto found = chosen_.find(what);
  return found == chosen_.end() ? nullptr : &found->second;
}

bool Algorithms::wanted(const std::string& what) const {
  return chosen_.count(what) == 0 && timed_for_.count(what) == 0;
}

void Algorithms::add(const std::string& what, const std::string& algorithm, const Timing& timing) {
  char times[96];
  std::snprintf(times, sizeof(times), "\t%.2f\t%.2f\t%zu\n", timing.microseconds, timing.first_microseconds,
                timing.candidates);
  timed_for_.insert(what);
  timed_ += what + '\t' + algorithm + times;
}

bool runs(const Candidate& candidate) {
  try {
    candidate(0);
    return true;
  } catch (const Error&) {
    return false;
  }
}

Timing time_in_turns(mimo_stream& stream, const std::vector<Candidate>& candidates) {
  Stopwatch stopwatch(stream);
  stopwatch.sample(candidates[0], 3);
  const float once = stopwatch.sample(candidates[0], 3);
  const auto calls = std::clamp<int64_t>(static_cast<int64_t>(std::ceil(sample_microseconds / once)), 4, 64);
  std::vector<std::vector<float>> samples(candidates.size());
  for (size_t i = 0; i < candidates.size(); ++i) samples[i].push_back(stopwatch.sample(candidates[i], calls));
  float fastest = samples[0][0];
  for (const auto& of : samples) fastest = std::min(fastest, of[0]);
  for (int round = 1; round < rounds; ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (i > 0 && samples[i][0] > fastest * worth_another_round) continue;
      samples[i].push_back(stopwatch.sample(candidates[i], calls));
    }
  }
  Timing timing{0, candidates.size(), median(samples[0]), median(samples[0])};
  for (size_t i = 1; i < candidates.size(); ++i) {
    if (samples[i].size() < static_cast<size_t>(rounds)) continue;
    const float microseconds = median(samples[i]);
    if (microseconds < std::min(timing.microseconds, timing.first_microseconds * clearly_faster)) {
      timing.best = i;
      timing.microseconds = microseconds;
    }
  }
  return timing;
}

int64_t operand_sets(const mimo_stream& stream, int64_t bytes) {
  int cache = 0;
  check(cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, stream.device->index), "reading the device's properties");
  constexpr int64_t most = 8;
  return std::clamp<int64_t>((2 * static_cast<int64_t>(cache) + bytes - 1) / bytes, 1, most);
}

void fill_normal(mimo_stream& stream, void* y, int64_t elements, double scale, int32_t dtype, double mean) {
  mimo_philox_fill_args fill{};
  fill.y = y;
  fill.rows = 1;
  fill.width = fill.full_width = elements;
  fill.seed = 1;
  fill.a = mean;
  fill.b = scale;
  fill.distribution = MIMO_DISTRIBUTION_NORMAL;
  fill.dtype = dtype;
  philox_fill(stream, fill);
}

OccupiedMultiprocessors::OccupiedMultiprocessors(const mimo_device& device, int32_t count) {
  if (count == 0) return;
  check(cudaHostAlloc(reinterpret_cast<void**>(&leave_), sizeof(int32_t), cudaHostAllocMapped), "cudaHostAlloc");
  __atomic_store_n(leave_, 0, __ATOMIC_RELEASE);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  occupy(stream_, leave_, count, device.shared_bytes_per_block);
}

OccupiedMultiprocessors::~OccupiedMultiprocessors() {
  if (leave_ == nullptr) return;
  __atomic_store_n(leave_, 1, __ATOMIC_RELEASE);
  if (stream_ != nullptr) {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  cudaFreeHost(leave_);
}

}  // namespace mimo::cuda

using mimo::guard;
using mimo::cuda::check;

extern "C" {

int32_t mimo_device_set_algorithms(mimo_device* device, const char* choices) {
  return guard([&] {
    device->use();
    // Work in flight may use code of existing plans.
    check(cudaDeviceSynchronize(), "work before a choice of algorithms");
    device->set_algorithms(choices);
  });
}

int32_t mimo_device_time_algorithms(mimo_device* device, mimo_stream* stream, int32_t* left_out) {
  return guard([&] {
    device->use();
    check(cudaStreamSynchronize(stream->handle()), "work before algorithms are timed");
    *left_out = device->time_algorithms(*stream);
  });
}

int32_t mimo_device_timed_algorithms(mimo_device* device, char* text, int64_t capacity, int64_t* bytes) {
  return guard([&] {
    const std::string& timed = device->algorithms().timed();
    *bytes = static_cast<int64_t>(timed.size());
    timed.copy(text, static_cast<size_t>(std::min(capacity, *bytes)));
  });
}

}  // extern "C"
