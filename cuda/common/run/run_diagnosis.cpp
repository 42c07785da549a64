// Says why a run has failed: first the rank to blame, then where every other rank was, and which ranks were absent
// there. It is in C++, because a rank whose training thread computes prints it too.
#include <algorithm>
#include <cstring>

#include "group.h"
#include "run.h"

namespace mimo {
namespace {

/// A rank's recorded calls, newest first.
std::vector<const mimo_call_record*> calls_of(const RankRegion& of) {
  std::vector<const mimo_call_record*> calls;
  const int64_t count = of.calls;
  for (int64_t call = count - 1; call >= std::max<int64_t>(0, count - flight_records); --call) {
    const mimo_call_record& record = of.flight[call % flight_records];
    // Not all calls of a rank on another host are known.
    if (record.group[0] != 0) calls.push_back(&record);
  }
  return calls;
}

std::string joined(const std::vector<std::string>& parts, const char* between) {
  std::string text;
  for (const std::string& part : parts) {
    if (part.empty()) continue;
    if (!text.empty()) text += between;
    text += part;
  }
  return text;
}

std::string without_full_stop(std::string sentence) {
  if (!sentence.empty() && sentence.back() == '.') sentence.pop_back();
  return sentence;
}

/// "rank 2 (language, tp 0 dp 1; host box, process 4711)".
std::string describe_rank(int32_t rank, const RankRegion& of) {
  const int32_t pid = of.pid;
  const std::string place = joined({of.module, of.coordinates}, ", ");
  const std::string where = joined({of.host[0] == 0 ? "" : std::string("host ") + of.host,
                                    pid == 0 ? "" : "process " + std::to_string(pid)},
                                   ", ");
  const std::string about = joined({place, where}, "; ");
  return "rank " + std::to_string(rank) + (about.empty() ? "" : " (" + about + ")");
}

/// "language.tp all_reduce 41 (4096 bytes)".
std::string describe_call(const mimo_call_record& call) {
  return std::string(call.group) + " " + collective_name(static_cast<int32_t>(call.kind)) + " " +
         std::to_string(call.sequence) + " (" + std::to_string(call.bytes) + " bytes)";
}

std::string absentees(const mimo_call_record& call) {
  if (call.missing_count == 0) return "";
  const int64_t named = std::min<int64_t>(call.missing_count, std::size(call.missing));
  std::vector<std::string> ranks;
  for (int64_t i = 0; i < named; ++i) ranks.push_back(std::to_string(call.missing[i]));
  const std::string more = call.missing_count > named ? " and " + std::to_string(call.missing_count - named) + " more" : "";
  return std::string(" for ") + (named == 1 ? "rank " : "ranks ") + joined(ranks, ", ") + more;
}

/// Where a rank was that is not to blame.
std::string whereabouts(const RankRegion& of, bool recorded) {
  const std::vector<const mimo_call_record*> calls = calls_of(of);
  const int64_t waiting = of.waiting_call;
  for (const mimo_call_record* call : calls) {
    if (call->call == waiting) return "waited in " + describe_call(*call) + absentees(*call);
  }
  if (of.host[0] == 0) return recorded ? "has left no recording" : "had not joined";
  if (of.phase == MIMO_RANK_PHASE_FINISHED) return "had finished";
  for (const mimo_call_record* call : calls) {
    if (call->state == MIMO_CALL_STATE_FINISHED) continue;
    return "was busy, with " + describe_call(*call) + " started but not done" + absentees(*call);
  }
  return calls.empty() ? "was busy, before its first collective" : "was busy, after " + describe_call(*calls[0]);
}

/// The last thing the rank to blame did.
std::string last_act(const RankRegion& of) {
  const int64_t step = of.step;
  const std::string when = step > 0            ? "after step " + std::to_string(step)
                           : of.host[0] == 0 ? "before it joined"
                                             : "in its first step";
  const std::vector<const mimo_call_record*> calls = calls_of(of);
  if (calls.empty()) return when;
  const mimo_call_record& latest = *calls[0];
  if (latest.state == MIMO_CALL_STATE_FINISHED) return when + ", its last collective was " + describe_call(latest);
  return when + ", in " + describe_call(latest) + absentees(latest);
}

}  // namespace

std::string diagnosis_of(const Run& run) {
  const RunHeader& header = run.header();
  const int32_t blamed = header.failed_rank;
  const std::string reason = without_full_stop(header.reason);
  std::string text = blamed < 0 ? "The run failed: " + reason + "."
                                : describe_rank(blamed, run.region(blamed)) + " failed: " + reason + " (" +
                                      last_act(run.region(blamed)) + ").";
  for (int32_t rank = 0; rank < run.ranks(); ++rank) {
    if (rank == blamed) continue;
    const RankRegion& of = run.region(rank);
    const bool own = of.error[0] != 0 && std::strcmp(of.error, header.reason) != 0;
    text += "\n  " + describe_rank(rank, of) + " " + whereabouts(of, header.recorded != 0) +
            (own ? " and failed too: " + without_full_stop(of.error) : "") + ".";
  }
  return text;
}

}  // namespace mimo
