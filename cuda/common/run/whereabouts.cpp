#include "whereabouts.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <tuple>
#include <utility>

namespace mimo {
namespace {

/// The calls of a rank that a diagnosis tells of: the one it waits for, the latest, and those not done; the newest first.
std::vector<mimo_call_record> telling_calls(const Run& run, int32_t rank) {
  const std::vector<const mimo_call_record*> calls = run.calls_of(rank);
  const int64_t waiting = run.region(rank).waiting_call;
  std::vector<const mimo_call_record*> told;
  const auto tell = [&](auto&& of) {
    for (const mimo_call_record* call : calls) {
      const bool known = std::find(told.begin(), told.end(), call) != told.end();
      if (!known && told.size() < static_cast<size_t>(reported_calls) && of(*call)) told.push_back(call);
    }
  };
  tell([&](const mimo_call_record& call) { return call.call == waiting || &call == calls.front(); });
  tell([](const mimo_call_record& call) { return call.state != MIMO_CALL_STATE_FINISHED; });
  std::sort(told.begin(), told.end(), [](const auto* a, const auto* b) { return a->call > b->call; });
  std::vector<mimo_call_record> records;
  for (const mimo_call_record* call : told) records.push_back(*call);
  return records;
}

/// Takes a phase over; the host of a rank that has failed may not have heard of it.
void take_phase(RankRegion& of, int32_t phase) {
  const bool known = phase >= MIMO_RANK_PHASE_ABSENT && phase <= MIMO_RANK_PHASE_FAILED;
  if (known && of.phase != MIMO_RANK_PHASE_FAILED) of.phase = phase;
}

}  // namespace

RankIdentity name_of(const Run& run, int32_t rank) {
  const RankRegion& of = run.region(rank);
  RankIdentity name{rank, of.pid, {}, {}, {}};
  copy_string(name.host, sizeof(name.host), of.host);
  copy_string(name.module, sizeof(name.module), of.module);
  copy_string(name.coordinates, sizeof(name.coordinates), of.coordinates);
  return name;
}

void take_name(Run& run, const RankIdentity& name) {
  RankRegion& of = run.region(name.rank);
  copy_string(of.host, sizeof(of.host), name.host);
  copy_string(of.module, sizeof(of.module), name.module);
  copy_string(of.coordinates, sizeof(of.coordinates), name.coordinates);
  of.progress_time = monotonic_nanoseconds();
  of.pid = name.pid;
}

void tell_whereabouts(const Run& run, Link& link) {
  for (const int32_t rank : run.local_ranks()) {
    const RankRegion& of = run.region(rank);
    RankState told{};
    told.rank = rank;
    told.phase = of.phase;
    told.step = of.step;
    told.calls = of.calls;
    told.waiting_call = of.waiting_call;
    copy_string(told.error, sizeof(told.error), of.error);
    const std::vector<mimo_call_record> records = telling_calls(run, rank);
    std::copy(records.begin(), records.end(), told.records);
    link.send(MessageType::rank_state, told);
  }
}

void take_whereabouts(Run& run, const RankState& told) {
  RankRegion& of = run.region(told.rank);
  FarCalls& calls = run.far_calls(told.rank);
  std::copy(std::begin(told.records), std::end(told.records), calls.calls);
  for (mimo_call_record& record : calls.calls) record.missing_count = std::clamp<int64_t>(record.missing_count, 0, max_ranks);
  take_phase(of, told.phase);
  of.step = told.step;
  of.calls = told.calls;
  of.waiting_call = told.waiting_call;
  of.told = 1;
  copy_string(of.error, sizeof(of.error), told.error);
}

std::vector<BegunRange> begun_here(const Run& run) {
  std::vector<BegunRange> runs;
  for (const int32_t rank : run.local_ranks()) {
    for (const LatestBegun& latest : run.flight(rank).begun) {
      const uint64_t group = latest.group;
      for (const int32_t values : {0, 1}) {
        const int64_t sequence = latest.sequence[values];
        if (group != 0 && sequence > 0) runs.push_back({group, sequence, values, rank, rank});
      }
    }
  }
  return merged(std::move(runs));
}

std::vector<BegunRange> merged(std::vector<BegunRange> runs) {
  const auto begun = [](const BegunRange& run) { return std::tuple(run.group, run.values, run.sequence); };
  std::sort(runs.begin(), runs.end(), [&](const BegunRange& a, const BegunRange& b) {
    return std::pair(begun(a), a.first) < std::pair(begun(b), b.first);
  });
  std::vector<BegunRange> joined;
  for (const BegunRange& run : runs) {
    const bool next = !joined.empty() && begun(joined.back()) == begun(run) && run.first == joined.back().last + 1;
    if (next) joined.back().last = run.last;
    else joined.push_back(run);
  }
  return joined;
}

void publish_begun(Run& run, const std::vector<BegunRange>& runs) {
  const int64_t count = std::min(static_cast<int64_t>(runs.size()), begun_capacity(run.ranks()));
  std::copy(runs.begin(), runs.begin() + count, run.begun_runs());
  run.header().begun_runs.store(count, std::memory_order_release);
}

ProgressSummary merged(const ProgressSummary& a, const ProgressSummary& b) {
  const auto first = [](auto x, auto y) { return x < 0 ? y : y < 0 ? x : std::min(x, y); };
  return {a.joined + b.joined,
          a.finished + b.finished,
          first(a.absent, b.absent),
          first(a.busy, b.busy),
          first(a.progress_age, b.progress_age),
          std::min(a.step, b.step)};
}

void store(const ProgressSummary& outlook, SharedProgress& to) {
  to.joined = outlook.joined;
  to.finished = outlook.finished;
  to.absent = outlook.absent;
  to.busy = outlook.busy;
  to.progress_time = outlook.progress_age < 0 ? -1 : monotonic_nanoseconds() - outlook.progress_age;
  to.step = outlook.step;
}

}  // namespace mimo
