// Which algorithm a vendor library takes for a call: its own first answer, or what was timed before
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

/// Adds " name value value ..." to the key of a choice.
void add_values(std::string& text, const char* name, std::initializer_list<int64_t> values);

/// Queues one call on the stream that candidates are timed on; `turn` says which set of operands.
using Candidate = std::function<void(int64_t turn)>;

struct Timing {
  size_t best, candidates;
  float microseconds, first_microseconds;
};

/// The choices of a device, by the text of the call that each is for.
class Algorithms {
 public:
  /// Replaces all choices. A line each: the call, a tab, the algorithm; fields behind another tab are ignored.
  void set(const std::string& lines);
  /// Null where the library's first answer is taken.
  const std::string* find(const std::string& what) const;
  /// Whether there is no choice yet, given or timed.
  bool wanted(const std::string& what) const;
  /// A choice that was timed.
  void add(const std::string& what, const std::string& algorithm, const Timing& timing);
  /// Choices that were timed since the device was opened, in the form that `set` reads, with the fields of
  /// mimo_device_timed_algorithms behind.
  const std::string& timed() const { return timed_; }

 private:
  std::unordered_map<std::string, std::string> chosen_;
  std::unordered_set<std::string> timed_for_;
  std::string timed_;
};

/// Whether a call of the candidate succeeds.
bool runs(const Candidate& candidate);

/// Times candidates in turns, so that a change of clocks meets them all, and compares the medians of those that a first round
/// leaves. Every candidate has run once before. The first is the library's own answer, which stays unless another is faster by a hundredth. Waits for
/// the stream.
Timing time_in_turns(mimo_stream& stream, const std::vector<Candidate>& candidates);

/// Sets of operands of `bytes` together that candidates use in turn, so that the L2 cache holds none of them.
int64_t operand_sets(const mimo_stream& stream, int64_t bytes);

/// Normally distributed numbers.
void fill_normal(mimo_stream& stream, void* y, int64_t elements, double scale, int32_t dtype, double mean = 0);

/// Multiprocessors that are taken away from other kernels while it lives, as a collective's kernel does.
class OccupiedMultiprocessors {
 public:
  OccupiedMultiprocessors(const mimo_device& device, int32_t count);
  ~OccupiedMultiprocessors();
  OccupiedMultiprocessors(const OccupiedMultiprocessors&) = delete;
  OccupiedMultiprocessors& operator=(const OccupiedMultiprocessors&) = delete;

 private:
  int32_t* leave_ = nullptr;  // pinned; the kernel reads it
  cudaStream_t stream_ = nullptr;
};

}  // namespace mimo::cuda
