#include "whereabouts.h"

#include <algorithm>
#include <cstring>

namespace mimo {
namespace {

/// The calls of a rank that others ask for: the latest, the one it waits for, those not done, and the latest of each group.
std::vector<mimo_call_record> telling_calls(const RankRegion& of) {
  std::vector<mimo_call_record> told;
  const int64_t calls = of.calls;
  const int64_t waiting = of.waiting_call;
  for (int64_t call = calls - 1; call >= std::max<int64_t>(0, calls - flight_records); --call) {
    const mimo_call_record& record = of.flight[call % flight_records];
    const bool known = std::any_of(told.begin(), told.end(), [&](const mimo_call_record& other) {
      return std::strcmp(other.group, record.group) == 0 && other.kind == record.kind;
    });
    if (!known || call == waiting || record.state != MIMO_CALL_STATE_FINISHED) told.push_back(record);
    if (told.size() == static_cast<size_t>(told_calls)) break;
  }
  return told;
}

/// Takes a phase over; the host of a rank that has failed may not have heard of it.
void take_phase(RankRegion& of, int32_t phase) {
  const bool known = phase >= MIMO_RANK_PHASE_ABSENT && phase <= MIMO_RANK_PHASE_FAILED;
  if (known && of.phase != MIMO_RANK_PHASE_FAILED) of.phase = phase;
}

}  // namespace

Beat beat_of(const Run& run, int32_t rank) {
  const RankRegion& of = run.region(rank);
  const int64_t age = monotonic_nanoseconds() - of.progress_time;
  return {rank, of.phase, of.heartbeat, of.progress, age, of.step, of.calls, of.waiting_call};
}

void take_beat(Run& run, const Beat& beat) {
  RankRegion& of = run.region(beat.rank);
  of.heartbeat = beat.heartbeat;
  of.progress = beat.progress;
  of.progress_time = monotonic_nanoseconds() - beat.progress_age;
  of.step = beat.step;
  // The records that came with its whereabouts belong to the number of calls it had then.
  if (!run.failed()) {
    of.calls = beat.calls;
    of.waiting_call = beat.waiting_call;
  }
  take_phase(of, beat.phase);
}

Name name_of(const Run& run, int32_t rank) {
  const RankRegion& of = run.region(rank);
  Name name{rank, of.pid, {}, {}, {}};
  copy_string(name.host, sizeof(name.host), of.host);
  copy_string(name.module, sizeof(name.module), of.module);
  copy_string(name.coordinates, sizeof(name.coordinates), of.coordinates);
  return name;
}

void take_name(Run& run, const Name& name) {
  RankRegion& of = run.region(name.rank);
  copy_string(of.host, sizeof(of.host), name.host);
  copy_string(of.module, sizeof(of.module), name.module);
  copy_string(of.coordinates, sizeof(of.coordinates), name.coordinates);
  of.progress_time = monotonic_nanoseconds();
  of.pid = name.pid;
}

void tell_whereabouts(const Run& run, Link& link) {
  for (int32_t rank = 0; rank < run.ranks(); ++rank) {
    if (!run.is_local(rank)) continue;
    const RankRegion& of = run.region(rank);
    Whereabouts told{};
    told.rank = rank;
    told.phase = of.phase;
    told.step = of.step;
    told.calls = of.calls;
    told.waiting_call = of.waiting_call;
    copy_string(told.error, sizeof(told.error), of.error);
    const std::vector<mimo_call_record> records = telling_calls(of);
    told.count = static_cast<int32_t>(records.size());
    std::copy(records.begin(), records.end(), told.records);
    link.say(Word::region, told);
  }
}

void take_whereabouts(Run& run, const Whereabouts& told) {
  RankRegion& of = run.region(told.rank);
  for (mimo_call_record& record : of.flight) {
    record = {};
    record.call = -1;
    record.state = MIMO_CALL_STATE_FINISHED;
  }
  const int32_t count = std::clamp(told.count, 0, told_calls);
  for (int32_t i = 0; i < count; ++i) {
    if (told.records[i].call < 0) continue;
    mimo_call_record& record = of.flight[told.records[i].call % flight_records];
    record = told.records[i];
    record.missing_count = std::clamp<int64_t>(record.missing_count, 0, max_ranks);
  }
  take_phase(of, told.phase);
  of.step = told.step;
  of.calls = told.calls;
  of.waiting_call = told.waiting_call;
  copy_string(of.error, sizeof(of.error), told.error);
}

}  // namespace mimo
