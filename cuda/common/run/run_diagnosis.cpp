// The diagnosis of a failed run: the failed rank with the reason, then the state of every other rank, with the ranks that its
// collective waited for. In C++, because a rank whose training thread computes has no JavaScript that could print it.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "group.h"
#include "run.h"

namespace mimo {
namespace {

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

/// As describe_rank, or "rank 2" alone for a rank that this host does not know.
std::string describe_any(const Run& run, int32_t rank) {
  return run.knows(rank) ? describe_rank(rank, run.region(rank)) : "rank " + std::to_string(rank);
}

/// "language.tp all_reduce 41 (4096 bytes)".
std::string describe_call(const mimo_call_record& call) {
  return std::string(call.group) + " " + collective_name(static_cast<int32_t>(call.kind)) + " " +
         std::to_string(call.sequence) + " (" + std::to_string(call.bytes) + " bytes)";
}

/// " for ranks 1, 3": the members that a failed call waited for, or "".
std::string describe_missing(const mimo_call_record& call) {
  if (call.missing_count == 0) return "";
  const int64_t named = std::min<int64_t>(call.missing_count, std::size(call.missing));
  std::vector<std::string> ranks;
  for (int64_t i = 0; i < named; ++i) ranks.push_back(std::to_string(call.missing[i]));
  const std::string more = call.missing_count > named ? " and " + std::to_string(call.missing_count - named) + " more" : "";
  return std::string(" for ") + (named == 1 ? "rank " : "ranks ") + joined(ranks, ", ") + more;
}

/// State of a rank that is not to blame, as a predicate.
std::string describe_state(const Run& run, int32_t rank) {
  if (!run.knows(rank)) return "is not known here";
  const RankRegion& of = run.region(rank);
  const bool recorded = run.header().from_recordings != 0;
  const std::vector<const mimo_call_record*> calls = run.calls_of(rank);
  const int64_t waiting = of.waiting_call;
  for (const mimo_call_record* call : calls) {
    if (call->call == waiting) return "waited in " + describe_call(*call) + describe_missing(*call);
  }
  if (of.host[0] == 0) return recorded ? "has left no recording" : "had not joined";
  if (!run.is_local(rank) && of.state_received == 0) return "did not report after the failure";
  if (of.phase == MIMO_RANK_PHASE_FINISHED) return "had finished";
  for (const mimo_call_record* call : calls) {
    if (call->state == MIMO_CALL_STATE_FINISHED) continue;
    return "was busy, with " + describe_call(*call) + " started but not done" + describe_missing(*call);
  }
  return calls.empty() ? "was busy, before its first collective" : "was busy, after " + describe_call(*calls[0]);
}

/// The last step and collective of the failed rank.
std::string describe_last_call(const Run& run, int32_t rank) {
  const RankRegion& of = run.region(rank);
  if (!run.is_local(rank) && of.state_received == 0 && of.host[0] != 0) {
    const int64_t step = run.progress_of_run().step;
    return step > 0 ? "after step " + std::to_string(step) + ", which all ranks had finished" : "in the first step";
  }
  const int64_t step = of.step;
  const std::string when = step > 0            ? "after step " + std::to_string(step)
                           : of.host[0] == 0 ? "before it joined"
                                             : "in its first step";
  const std::vector<const mimo_call_record*> calls = run.calls_of(rank);
  if (calls.empty()) return when;
  const mimo_call_record& latest = *calls[0];
  if (latest.state == MIMO_CALL_STATE_FINISHED) return when + ", its last collective was " + describe_call(latest);
  return when + ", in " + describe_call(latest) + describe_missing(latest);
}

/// In runs with more ranks than this, ranks in the same state share a line.
constexpr int32_t max_ranks_with_own_line = 64;
/// Most shared lines, and most ranges of ranks in a line.
constexpr size_t max_lines = 32, max_ranges = 16;

/// "3-510, 512": ascending ranks.
std::string describe_ranges(const std::vector<int32_t>& ranks) {
  std::vector<std::string> ranges;
  for (size_t at = 0; at < ranks.size();) {
    size_t end = at + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    ranges.push_back(std::to_string(ranks[at]));
    if (end - at > 1) ranges.back().append("-").append(std::to_string(ranks[end - 1]));
    at = end;
  }
  const bool cut = ranges.size() > max_ranges;
  if (cut) ranges.resize(max_ranges);
  if (cut) ranges.emplace_back("...");
  return joined(ranges, ", ");
}

/// A line for each state with all ranks that were in it. States of the fewest ranks come first, since these ranks differ from the
/// rest.
std::string describe_by_state(const Run& run, const std::map<std::string, std::vector<int32_t>>& states) {
  std::vector<std::pair<std::string, std::vector<int32_t>>> lines(states.begin(), states.end());
  std::stable_sort(lines.begin(), lines.end(),
                   [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  std::string text;
  size_t left = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto& [state, ranks] = lines[i];
    // The last line, the state of most ranks, is always printed.
    if (i >= max_lines && i + 1 < lines.size()) {
      left += ranks.size();
      continue;
    }
    if (left > 0) {
      const size_t others = i - max_lines;
      text += "\n  " + std::to_string(left) + (left == 1 ? " rank was in " : " ranks were in ") + std::to_string(others) +
              (others == 1 ? " other state." : " other states.");
    }
    text += "\n  ";
    if (ranks.size() == 1) text += describe_any(run, ranks[0]);
    else text.append(std::to_string(ranks.size())).append(" ranks (").append(describe_ranges(ranks)).append("), each of which");
    text.append(" ").append(state).append(".");
  }
  return text;
}

}  // namespace

std::string diagnosis_of(const Run& run) {
  const RunHeader& header = run.header();
  const int32_t failed_rank = header.failed_rank;
  const std::string reason = without_full_stop(header.reason);
  std::string text = "The run failed: " + reason + ".";
  if (failed_rank >= 0) text = describe_any(run, failed_rank) + " failed: " + reason;
  if (failed_rank >= 0) text += run.knows(failed_rank) ? " (" + describe_last_call(run, failed_rank) + ")." : ".";
  std::map<std::string, std::vector<int32_t>> states;
  for (int32_t rank = 0; rank < run.ranks(); ++rank) {
    if (rank == failed_rank) continue;
    std::string state = describe_state(run, rank);
    if (run.knows(rank)) {
      const RankRegion& of = run.region(rank);
      const bool own = of.error[0] != 0 && std::strcmp(of.error, header.reason) != 0;
      if (own) state += " and failed too: " + without_full_stop(of.error);
    }
    if (run.ranks() > max_ranks_with_own_line) {
      states[state].push_back(rank);
      continue;
    }
    text.append("\n  ").append(describe_any(run, rank)).append(" ").append(state).append(".");
  }
  return text + describe_by_state(run, states);
}

}  // namespace mimo
