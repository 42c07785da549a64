// Detects failed ranks: the heartbeat of each rank, and the checks of all ranks of a host.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "process_status.h"
#include "run.h"
#include "start_thread.h"
#include "status.h"

namespace mimo {
namespace {

constexpr int64_t heartbeat_interval = 200 * millisecond;
/// Most silence that a single check counts: after all processes were stopped (suspended machine, Ctrl-Z) no rank is to blame.
constexpr int64_t longest_check = 1000 * millisecond;
/// Time after a failure in which the training thread may end the process itself.
constexpr int64_t grace_period = 3200 * millisecond;
/// Time in which ranks that no launcher starts must join.
constexpr int64_t join_limit = 60'000 * millisecond;
/// The same for hosts below, which is longer because their own ranks check it first.
constexpr int64_t below_join_limit = 63'000 * millisecond;

}  // namespace

void Run::join(int32_t rank, int32_t exit_code) {
  MIMO_REQUIRE(rank_ < 0, "mimo_run_join (once per process)");
  require_alive();
  RankRegion& own = region(rank);
  if (own.phase != MIMO_RANK_PHASE_ABSENT) {
    throw Error(MIMO_ERROR_PEER, "Rank " + std::to_string(rank) + " has joined this run already (process " +
                                     std::to_string(own.pid) + ").");
  }
  rank_ = rank;
  exit_code_ = exit_code;
  gethostname(own.host, sizeof(own.host) - 1);
  own.pid = getpid();
  own.process_start_time = read_process_status(getpid()).start_time;
  own.progress_time = monotonic_nanoseconds();
  own.phase = MIMO_RANK_PHASE_RUNNING;
  heartbeat_thread_ = start_thread([this] { heartbeat_loop(); });
}

void Run::leave() {
  if (rank_ >= 0 && region(rank_).phase == MIMO_RANK_PHASE_RUNNING) region(rank_).phase = MIMO_RANK_PHASE_FINISHED;
  if (recording_.load() >= 0) unlink(recording_path_.c_str());
}

void Run::expect(int32_t rank, int32_t pid) {
  RankRegion& of = region(rank);
  int32_t unset = 0;
  if (of.pid.compare_exchange_strong(unset, pid)) of.process_start_time = read_process_status(pid).start_time;
}

/// Runs on a thread of its own, because the training thread may compute for minutes.
void Run::heartbeat_loop() {
  RankRegion& own = region(rank_);
  std::unique_lock<std::mutex> lock(stop_mutex_);
  while (!stop_) {
    lock.unlock();
    own.heartbeat.fetch_add(1, std::memory_order_relaxed);
    watch();
    write_recording();
    if (failed() && monotonic_nanoseconds() - header_->failed_time > grace_period) {
      // The training thread still computes or hangs. _exit, not exit: that thread may hold the locks of C's streams.
      conclude(exit_code_);
      _exit(exit_code_);
    }
    lock.lock();
    stop_condition_.wait_for(lock, std::chrono::nanoseconds(heartbeat_interval), [this] { return stop_; });
  }
}

void Run::watch() {
  if (failed()) return;
  const int64_t now = monotonic_nanoseconds();
  const int64_t elapsed = last_watch_ == 0 ? 0 : std::min(now - last_watch_, longest_check);
  last_watch_ = now;
  watched_.resize(local_.size());
  watch_supervisor(elapsed);
  for (size_t i = 0; i < local_.size(); ++i) watch_rank(local_[i], watched_[i], elapsed, now);
  // Ranks of other hosts are watched by each other, and the hosts by the relays; only host 0 checks the run as a whole.
  if (header_->own_host != 0) return;
  watch_joining(now);
  watch_progress(now);
}

void Run::supervise() {
  watch();
  header_->supervisor_polls.fetch_add(1);
}

void Run::watch_supervisor(int64_t elapsed) {
  const int64_t polls = header_->supervisor_polls;
  const bool silent = polls == supervisor_polls_seen_ && polls > 0;
  supervisor_polls_seen_ = polls;
  supervisor_silent_ = silent ? supervisor_silent_ + elapsed : 0;
}

/// Fails the run, unless this process is a rank whose launcher is alive, which then fails it itself.
void Run::fail_unless_supervised(int32_t rank, const std::string& sentence) {
  if (header_->supervised == 0 || rank_ < 0 || supervisor_silent_ >= longest_silence) fail(rank, sentence);
}

void Run::watch_rank(int32_t rank, WatchState& watched, int64_t elapsed, int64_t now) {
  RankRegion& of = region(rank);
  const int32_t phase = of.phase;
  if (phase == MIMO_RANK_PHASE_FINISHED || phase == MIMO_RANK_PHASE_FAILED) return;
  const int64_t heartbeat = of.heartbeat;
  const int32_t pid = of.pid;
  if (pid == 0) {
    if (now - header_->created > join_limit) fail_unless_supervised(rank, "it has not joined within 60 s");
    return;
  }
  const ProcessStatus process = read_process_status(pid);
  const char state = process.state;
  if (state == 0 || state == 'Z') {
    // A launcher waits for its processes and so learns the signal too.
    const bool launcher = header_->supervised != 0 && rank_ < 0;
    if (!launcher && of.phase != MIMO_RANK_PHASE_FINISHED) fail_unless_supervised(rank, describe_exit(process));
    return;
  }
  const bool alive = phase == MIMO_RANK_PHASE_RUNNING && heartbeat != watched.heartbeat;
  // A rank that has not joined may still be starting; its silence counts only while its process is stopped.
  const bool starting = phase == MIMO_RANK_PHASE_ABSENT && state != 'T';
  watched.heartbeat = heartbeat;
  watched.silence = alive || starting ? 0 : watched.silence + elapsed;
  if (watched.silence < longest_silence) return;
  const bool stopped = state == 'T';
  fail_unless_supervised(rank, stopped ? "it was stopped (SIGSTOP or SIGTSTP) for 5 s" : "its heartbeat has been silent for 5 s");
}

/// Fails the run when a rank of a host below has not joined in time.
void Run::watch_joining(int64_t now) {
  const int32_t absent = header_->progress_below.absent;
  if (absent >= 0 && now - header_->created > below_join_limit) fail_unless_supervised(absent, "it has not joined within 60 s");
}

/// Fails a run without progress. The rank to blame is the first that waits for no collective, since the others wait for it.
void Run::watch_progress(int64_t now) {
  const int64_t limit = header_->timeout_ms * millisecond;
  const SharedProgress& below = header_->progress_below;
  const int64_t progress_below = below.progress_time;
  if (progress_below >= 0 && now - progress_below < limit) return;
  int32_t busy = below.busy;
  bool running = progress_below >= 0;
  for (const int32_t rank : local_) {
    const RankRegion& of = region(rank);
    if (of.phase != MIMO_RANK_PHASE_RUNNING) continue;
    if (now - of.progress_time < limit) return;
    running = true;
    if (of.waiting_call < 0 && (busy < 0 || rank < busy)) busy = rank;
  }
  if (!running) return;
  char sentence[128];
  std::snprintf(sentence, sizeof(sentence), "%s for %.3g minutes",
                busy < 0 ? "every rank waits for another rank, without progress" : "it is alive but made no progress",
                static_cast<double>(header_->timeout_ms) / 60'000);
  fail_unless_supervised(busy, sentence);
}

}  // namespace mimo
