// The flight recorder: the latest collectives of each rank.
#include <algorithm>
#include <cstring>

#include "run.h"

namespace mimo {

int64_t Run::begin_call(const std::string& group, int64_t sequence, int32_t kind, int64_t bytes) {
  RankRegion& own = region(rank());
  const int64_t number = own.calls.load(std::memory_order_relaxed);
  mimo_call_record& entry = own.flight[number % flight_records];
  std::memset(&entry, 0, sizeof(entry));
  copy_string(entry.group, sizeof(entry.group), group.c_str());
  entry.call = number;
  entry.sequence = sequence;
  entry.kind = kind;
  entry.bytes = bytes;
  entry.started = monotonic_nanoseconds();
  own.calls.store(number + 1, std::memory_order_release);
  return number;
}

/// A call's entry; null when later calls have taken its place.
mimo_call_record* Run::record(int64_t number) const {
  mimo_call_record& entry = region(rank()).flight[number % flight_records];
  return entry.call == number ? &entry : nullptr;
}

void Run::end_call(int64_t number) {
  RankRegion& own = region(rank());
  const int64_t now = monotonic_nanoseconds();
  if (mimo_call_record* entry = record(number)) {
    entry->finished = now;
    entry->state = MIMO_CALL_STATE_FINISHED;
  }
  own.progress.fetch_add(1, std::memory_order_relaxed);
  own.progress_time.store(now, std::memory_order_relaxed);
}

void Run::fail_call(int64_t number, const std::vector<int32_t>& missing) {
  mimo_call_record* entry = record(number);
  if (entry == nullptr) return;
  entry->missing_count = static_cast<int64_t>(missing.size());
  for (size_t i = 0; i < std::min(missing.size(), std::size(entry->missing)); ++i) entry->missing[i] = missing[i];
  entry->state = MIMO_CALL_STATE_FAILED;
}

bool Run::has_begun(int32_t of_rank, const std::string& group, bool values, int64_t sequence) const {
  const RankRegion& of = region(of_rank);
  const int64_t calls = of.calls.load(std::memory_order_acquire);
  for (int64_t i = std::max<int64_t>(0, calls - flight_records); i < calls; ++i) {
    const mimo_call_record& entry = of.flight[i % flight_records];
    const bool message = entry.kind == MIMO_COLLECTIVE_SEND || entry.kind == MIMO_COLLECTIVE_RECEIVE;
    const bool alike = !message && (entry.kind >= MIMO_COLLECTIVE_BARRIER) == values;
    if (alike && entry.sequence >= sequence && group == entry.group) return true;
  }
  return false;
}

}  // namespace mimo
