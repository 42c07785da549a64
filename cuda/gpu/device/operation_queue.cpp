#include "operation_queue.h"

namespace mimo {
namespace {

/// Longer runs save little more, and the device might idle until the first operation.
constexpr size_t most_operations = 64;
/// A single operation is launched as fast as a recording of it.
constexpr size_t fewest_operations = 2;
/// Limit of the memory for runs that were seen but do not repeat: 20 times a step of the largest models.
constexpr size_t most_known_bytes = size_t{64} << 20;

}  // namespace

OperationQueue::OperationQueue(mimo_stream& stream, MemoryPool& pool, OperationRecorder& recorder)
    : stream_(stream), pool_(pool), recorder_(recorder) {
  pool_.add(this);
}

OperationQueue::~OperationQueue() {
  pool_.remove(this);
  forget();
}

void OperationQueue::add(Function function, const void* arguments, int64_t bytes) {
  // An operation that calls another: the inner one is part of it.
  if (handing_over_) return function(stream_, arguments);
  if (operations_.empty()) held_since_ = pool_.frees();
  content_.append(reinterpret_cast<const char*>(&function), sizeof(function));
  operations_.push_back({function, content_.size()});
  content_.append(static_cast<const char*>(arguments), static_cast<size_t>(bytes));
  content_.resize((content_.size() + 7) / 8 * 8);  // aligns the next function and its arguments
  if (operations_.size() == most_operations) flush();
}

void OperationQueue::flush() {
  if (handing_over_ || operations_.empty()) return;
  handing_over_ = true;
  try {
    hand_over();
  } catch (...) {
    clear_pending();
    throw;
  }
  clear_pending();
}

void OperationQueue::hand_over() {
  if (operations_.size() >= fewest_operations) {
    if (known_bytes_ > most_known_bytes) forget();
    const auto [found, first_time] = known_.try_emplace(content_);
    Known& known = found->second;
    if (first_time) {
      // A run that occurs twice will probably occur again. It is not recorded at its first occurrence, because libraries
      // initialise themselves at a first call.
      known_bytes_ += content_.size();
    } else {
      if (known.recording == nullptr && !known.unfit) {
        recording_ = true;
        known.recording = recorder_.record([](void* queue) { static_cast<OperationQueue*>(queue)->run(); }, this);
        recording_ = false;
        known.unfit = known.recording == nullptr;
        statistics_.graphs += known.unfit ? 0 : 1;
      }
      if (known.recording != nullptr) {
        recorder_.launch(known.recording);
        statistics_.launches += 1;
        statistics_.operations_in_graphs += static_cast<int64_t>(operations_.size());
        return;
      }
    }
  }
  run();
  statistics_.operations_alone += static_cast<int64_t>(operations_.size());
}

void OperationQueue::run() {
  for (const Operation& one : operations_) one.function(stream_, content_.data() + one.arguments);
}

void OperationQueue::clear_pending() {
  operations_.clear();
  content_.clear();
  handing_over_ = recording_ = false;
  held_since_ = std::numeric_limits<int64_t>::max();
  if (forget_after_) forget();
}

void OperationQueue::forget() {
  for (auto& [content, known] : known_) {
    if (known.recording != nullptr) recorder_.drop(known.recording);
  }
  known_.clear();
  known_bytes_ = 0;
  forget_after_ = false;
}

int64_t OperationQueue::before_trim() {
  // While recording, nothing can be freed: the recording fails for lack of memory and its operations run one by one.
  if (recording_) return 0;
  // Recordings keep using the memory cached for them.
  if (handing_over_) {
    forget_after_ = true;
  } else {
    forget();
  }
  return held_since_;
}

}  // namespace mimo
