// Selection of a vendor library's algorithm for a call: the library's first answer, or the result of earlier timing
// (mimo/algorithms.h).
#pragma once
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "device.h"

namespace mimo::cuda {

/// Appends " name value value ..." to the key of a choice.
void add_values(std::string& text, const char* name, std::initializer_list<int64_t> values);

/// Queues one call on the stream used for timing; `turn` selects the set of operands.
using Candidate = std::function<void(int64_t turn)>;

struct Timing {
  size_t best, candidates;
  float microseconds, first_microseconds;
};

/// A device's algorithm choices, by the text that describes the call.
class Algorithms {
 public:
  /// Replaces all choices. Each line: call, tab, algorithm; fields after another tab are ignored.
  void set(const std::string& lines);
  /// Null if the library's first answer is to be used.
  const std::string* find(const std::string& what) const;
  /// Whether the call has no choice yet, given or timed.
  bool wanted(const std::string& what) const;
  /// Adds a timed choice.
  void add(const std::string& what, const std::string& algorithm, const Timing& timing);
  /// Choices timed since the device was opened, in the format that `set` reads, followed by the fields of
  /// mimo_device_timed_algorithms.
  const std::string& timed() const { return timed_; }

 private:
  std::unordered_map<std::string, std::string> chosen_;
  std::unordered_set<std::string> timed_for_;
  std::string timed_;
};

/// Whether a call of the candidate succeeds.
bool runs(const Candidate& candidate);

/// Times candidates in interleaved rounds, so that clock changes affect all of them, and compares the medians of those
/// that remain after the first round. Each candidate must have run once before. The first one is the library's own
/// answer, kept unless another is at least 1 % faster. Waits for the stream.
Timing time_in_turns(mimo_stream& stream, const std::vector<Candidate>& candidates);

/// Number of operand sets, of `bytes` together, to rotate through so that the L2 cache holds none of them.
int64_t operand_sets(const mimo_stream& stream, int64_t bytes);

/// Fills a buffer with normally distributed numbers.
void fill_normal(mimo_stream& stream, void* y, int64_t elements, double scale, int32_t dtype, double mean = 0);

/// Occupies SMs while it exists, as a collective's kernel does.
class OccupiedMultiprocessors {
 public:
  OccupiedMultiprocessors(const mimo_device& device, int32_t count);
  ~OccupiedMultiprocessors();
  OccupiedMultiprocessors(const OccupiedMultiprocessors&) = delete;
  OccupiedMultiprocessors& operator=(const OccupiedMultiprocessors&) = delete;

 private:
  int32_t* leave_ = nullptr;  // pinned, polled by the kernel
  cudaStream_t stream_ = nullptr;
};

}  // namespace mimo::cuda
