#include "rank_state.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <tuple>
#include <utility>

namespace mimo {
namespace {

/// The calls of a rank that a diagnosis needs: the call it waits for, the latest call, and unfinished calls; newest first.
std::vector<mimo_call_record> calls_to_report(const Run& run, int32_t rank) {
  const std::vector<const mimo_call_record*> calls = run.calls_of(rank);
  const int64_t waiting = run.region(rank).waiting_call;
  std::vector<const mimo_call_record*> chosen;
  const auto choose = [&](auto&& matches) {
    for (const mimo_call_record* call : calls) {
      const bool known = std::find(chosen.begin(), chosen.end(), call) != chosen.end();
      if (!known && chosen.size() < static_cast<size_t>(reported_calls) && matches(*call)) chosen.push_back(call);
    }
  };
  choose([&](const mimo_call_record& call) { return call.call == waiting || &call == calls.front(); });
  choose([](const mimo_call_record& call) { return call.state != MIMO_CALL_STATE_FINISHED; });
  std::sort(chosen.begin(), chosen.end(), [](const auto* a, const auto* b) { return a->call > b->call; });
  std::vector<mimo_call_record> records;
  for (const mimo_call_record* call : chosen) records.push_back(*call);
  return records;
}

/// Stores a received phase, except over FAILED: the host of a failed rank may not know yet that this host has failed the rank.
void store_phase(RankRegion& of, int32_t phase) {
  const bool known = phase >= MIMO_RANK_PHASE_ABSENT && phase <= MIMO_RANK_PHASE_FAILED;
  if (known && of.phase != MIMO_RANK_PHASE_FAILED) of.phase = phase;
}

}  // namespace

RankIdentity identity_of(const Run& run, int32_t rank) {
  const RankRegion& of = run.region(rank);
  RankIdentity identity{rank, of.pid, {}, {}, {}};
  copy_string(identity.host, sizeof(identity.host), of.host);
  copy_string(identity.module, sizeof(identity.module), of.module);
  copy_string(identity.coordinates, sizeof(identity.coordinates), of.coordinates);
  return identity;
}

void store_identity(Run& run, const RankIdentity& identity) {
  RankRegion& of = run.region(identity.rank);
  copy_string(of.host, sizeof(of.host), identity.host);
  copy_string(of.module, sizeof(of.module), identity.module);
  copy_string(of.coordinates, sizeof(of.coordinates), identity.coordinates);
  of.progress_time = monotonic_nanoseconds();
  of.pid = identity.pid;
}

void send_rank_states(const Run& run, Link& link) {
  for (const int32_t rank : run.local_ranks()) {
    const RankRegion& of = run.region(rank);
    RankState state{};
    state.rank = rank;
    state.phase = of.phase;
    state.step = of.step;
    state.calls = of.calls;
    state.waiting_call = of.waiting_call;
    copy_string(state.error, sizeof(state.error), of.error);
    const std::vector<mimo_call_record> records = calls_to_report(run, rank);
    std::copy(records.begin(), records.end(), state.records);
    link.send(MessageType::rank_state, state);
  }
}

void store_rank_state(Run& run, const RankState& state) {
  RankRegion& of = run.region(state.rank);
  RemoteCalls& calls = run.remote_calls(state.rank);
  std::copy(std::begin(state.records), std::end(state.records), calls.calls);
  for (mimo_call_record& record : calls.calls) record.missing_count = std::clamp<int64_t>(record.missing_count, 0, max_ranks);
  store_phase(of, state.phase);
  of.step = state.step;
  of.calls = state.calls;
  of.waiting_call = state.waiting_call;
  of.state_received = 1;
  copy_string(of.error, sizeof(of.error), state.error);
}

std::vector<BegunRange> local_begun(const Run& run) {
  std::vector<BegunRange> ranges;
  for (const int32_t rank : run.local_ranks()) {
    for (const LatestBegun& latest : run.flight(rank).begun) {
      const uint64_t group = latest.group;
      for (const int32_t values : {0, 1}) {
        const int64_t sequence = latest.sequence[values];
        if (group != 0 && sequence > 0) ranges.push_back({group, sequence, values, rank, rank});
      }
    }
  }
  return merged(std::move(ranges));
}

std::vector<BegunRange> merged(std::vector<BegunRange> ranges) {
  const auto begun = [](const BegunRange& range) { return std::tuple(range.group, range.values, range.sequence); };
  std::sort(ranges.begin(), ranges.end(), [&](const BegunRange& a, const BegunRange& b) {
    return std::pair(begun(a), a.first) < std::pair(begun(b), b.first);
  });
  std::vector<BegunRange> joined;
  for (const BegunRange& range : ranges) {
    const bool next = !joined.empty() && begun(joined.back()) == begun(range) && range.first == joined.back().last + 1;
    if (next) joined.back().last = range.last;
    else joined.push_back(range);
  }
  return joined;
}

void store_begun(Run& run, const std::vector<BegunRange>& ranges) {
  const int64_t count = std::min(static_cast<int64_t>(ranges.size()), begun_capacity(run.ranks()));
  std::copy(ranges.begin(), ranges.begin() + count, run.begun_ranges());
  run.header().begun_count.store(count, std::memory_order_release);
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

void store(const ProgressSummary& summary, SharedProgress& to) {
  to.joined = summary.joined;
  to.finished = summary.finished;
  to.absent = summary.absent;
  to.busy = summary.busy;
  to.progress_time = summary.progress_age < 0 ? -1 : monotonic_nanoseconds() - summary.progress_age;
  to.step = summary.step;
}

}  // namespace mimo
