// The flight recorder: records of the latest collectives of each rank.
#include <algorithm>
#include <cstring>

#include "group.h"
#include "run.h"

namespace mimo {

int64_t Run::begin_call(const std::string& group, int64_t sequence, int32_t kind, int64_t bytes) {
  RankRegion& own = region(rank());
  const int64_t number = own.calls.load(std::memory_order_relaxed);
  mimo_call_record& entry = flight(rank()).calls[number % flight_records];
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

/// The entry of a call; null when later calls have overwritten it.
mimo_call_record* Run::record(int64_t number) const {
  mimo_call_record& entry = flight(rank()).calls[number % flight_records];
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

std::vector<const mimo_call_record*> Run::calls_of(int32_t of_rank) const {
  std::vector<const mimo_call_record*> calls;
  if (!is_local(of_rank)) {
    for (const mimo_call_record& record : remote_calls(of_rank).calls) {
      if (record.group[0] != 0) calls.push_back(&record);
    }
    return calls;
  }
  const int64_t count = region(of_rank).calls.load(std::memory_order_acquire);
  const FlightRecorder& recorder = flight(of_rank);
  for (int64_t call = count - 1; call >= std::max<int64_t>(0, count - flight_records); --call) {
    const mimo_call_record& record = recorder.calls[call % flight_records];
    // A recording may lack entries.
    if (record.group[0] != 0) calls.push_back(&record);
  }
  return calls;
}

namespace {

bool is_message(int64_t kind) { return kind == MIMO_COLLECTIVE_SEND || kind == MIMO_COLLECTIVE_RECEIVE; }
bool is_host_value_call(int64_t kind) { return kind == MIMO_COLLECTIVE_BARRIER || kind == MIMO_COLLECTIVE_EXCHANGE; }
uint64_t hash_of_name(const std::string& group) { return group_key(group, {}); }

}  // namespace

void Run::record_begun(const std::string& group, int64_t sequence, int32_t kind) {
  if (is_message(kind)) return;
  const uint64_t key = hash_of_name(group);
  for (LatestBegun& latest : flight(rank()).begun) {
    if (latest.group != 0 && latest.group != key) continue;
    latest.group = key;
    latest.sequence[is_host_value_call(kind) ? 1 : 0] = sequence;
    return;
  }
}

bool Run::has_begun(int32_t of_rank, const std::string& group, bool values, int64_t sequence) const {
  if (!is_local(of_rank)) {
    const uint64_t key = hash_of_name(group);
    const BegunRange* const ranges = begun_ranges();
    const int64_t count = header_->begun_count.load(std::memory_order_acquire);
    return std::any_of(ranges, ranges + count, [&](const BegunRange& range) {
      return range.group == key && (range.values != 0) == values && range.sequence >= sequence && range.first <= of_rank &&
             of_rank <= range.last;
    });
  }
  const std::vector<const mimo_call_record*> calls = calls_of(of_rank);
  return std::any_of(calls.begin(), calls.end(), [&](const mimo_call_record* call) {
    return !is_message(call->kind) && is_host_value_call(call->kind) == values && call->sequence >= sequence &&
           group == call->group;
  });
}

}  // namespace mimo
