// Watches whether the ranks of a run live: the heartbeat of each, and the look at all ranks.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "process_look.h"
#include "run.h"
#include "start_thread.h"
#include "status.h"

namespace mimo {
namespace {

constexpr int64_t beat_interval = 200 * millisecond;
/// A look counts at most this much silence: when everything was stopped (a laptop's lid, Ctrl-Z), no rank is to blame.
constexpr int64_t longest_look = 1000 * millisecond;
/// How long the others of a failed run may take to notice by themselves.
constexpr int64_t grace = 3200 * millisecond;
/// Time in which ranks must join when no launcher starts them.
constexpr int64_t join_limit = 60'000 * millisecond;
/// The first rank of a host says so of its neighbours; of a host without any it is said at the centre, later.
constexpr int64_t far_join_limit = 63'000 * millisecond;

}  // namespace

void Run::join(int32_t rank, int32_t exit_code) {
  MIMO_REQUIRE(rank_ < 0, "mimo_run_join (once a process)");
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
  own.started = look_at_process(getpid()).started;
  own.progress_time = monotonic_nanoseconds();
  own.phase = MIMO_RANK_PHASE_RUNNING;
  heartbeat_thread_ = start_thread([this] { beat(); });
}

void Run::leave() {
  if (rank_ >= 0 && region(rank_).phase == MIMO_RANK_PHASE_RUNNING) region(rank_).phase = MIMO_RANK_PHASE_FINISHED;
  if (recording_.load() >= 0) unlink(recording_path_.c_str());
}

void Run::expect(int32_t rank, int32_t pid) {
  RankRegion& of = region(rank);
  int32_t nobody = 0;
  if (of.pid.compare_exchange_strong(nobody, pid)) of.started = look_at_process(pid).started;
}

/// The heart: its own thread, because the training thread may compute for minutes.
void Run::beat() {
  RankRegion& own = region(rank_);
  std::unique_lock<std::mutex> lock(stop_mutex_);
  while (!stop_) {
    lock.unlock();
    own.heartbeat.fetch_add(1, std::memory_order_relaxed);
    watch();
    write_recording();
    if (failed() && monotonic_nanoseconds() - header_->failed_time > grace) {
      // The training thread computes or hangs elsewhere; it had its time to end by itself. Buffers of C's streams are not
      // written: it may hold their locks.
      conclude(exit_code_);
      _exit(exit_code_);
    }
    lock.lock();
    stop_condition_.wait_for(lock, std::chrono::nanoseconds(beat_interval), [this] { return stop_; });
  }
}

void Run::watch() {
  if (failed()) return;
  const int64_t now = monotonic_nanoseconds();
  const int64_t elapsed = last_watch_ == 0 ? 0 : std::min(now - last_watch_, longest_look);
  last_watch_ = now;
  watched_.resize(local_.size());
  watch_supervisor(elapsed);
  for (size_t i = 0; i < local_.size(); ++i) watch_rank(local_[i], watched_[i], elapsed, now);
  // The others of their hosts watch the other ranks, and relays watch the hosts.
  if (header_->own_host != 0) return;
  watch_joining(now);
  watch_progress(now);
}

void Run::supervise() {
  watch();
  header_->supervisor_polls.fetch_add(1);
}

void Run::watch_supervisor(int64_t elapsed) {
  const int64_t looks = header_->supervisor_polls;
  const bool silent = looks == supervisor_polls_seen_ && looks > 0;
  supervisor_polls_seen_ = looks;
  supervisor_silent_ = silent ? supervisor_silent_ + elapsed : 0;
}

/// Fails the run, unless that is the launcher's to do.
void Run::fail_unless_supervised(int32_t rank, const std::string& sentence) {
  if (header_->supervised == 0 || rank_ < 0 || supervisor_silent_ >= longest_silence) fail(rank, sentence);
}

void Run::watch_rank(int32_t rank, WatchState& seen, int64_t elapsed, int64_t now) {
  RankRegion& of = region(rank);
  const int32_t phase = of.phase;
  if (phase == MIMO_RANK_PHASE_FINISHED || phase == MIMO_RANK_PHASE_FAILED) return;
  const int64_t heartbeat = of.heartbeat;
  const int32_t pid = of.pid;
  if (pid == 0) {
    if (now - header_->created > join_limit) fail_unless_supervised(rank, "it has not joined within 60 s");
    return;
  }
  const ProcessLook look = look_at_process(pid);
  const char state = look.state;
  if (state == 0 || state == 'Z') {
    // A launcher learns of a death by itself, with the signal.
    const bool heard = header_->supervised != 0 && rank_ < 0;
    if (!heard && of.phase != MIMO_RANK_PHASE_FINISHED) fail_unless_supervised(rank, manner_of_death(look));
    return;
  }
  const bool beats = phase == MIMO_RANK_PHASE_RUNNING && heartbeat != seen.heartbeat;
  // A rank that has not joined may still be starting: only being stopped counts against it.
  const bool starting = phase == MIMO_RANK_PHASE_ABSENT && state != 'T';
  seen.heartbeat = heartbeat;
  seen.silent = beats || starting ? 0 : seen.silent + elapsed;
  if (seen.silent < longest_silence) return;
  fail_unless_supervised(rank, state == 'T' ? "it was stopped (SIGSTOP or SIGTSTP) for 5 s" : "its heartbeat has been silent for 5 s");
}

/// Ends the run when the ranks of a host below have not joined in time.
void Run::watch_joining(int64_t now) {
  const int32_t absent = header_->progress_below.absent;
  if (absent >= 0 && now - header_->created > far_join_limit) fail_unless_supervised(absent, "it has not joined within 60 s");
}

/// Looks for a run without progress: a rank that waits for others is not to blame as long as another rank does not
/// wait.
void Run::watch_progress(int64_t now) {
  const int64_t limit = header_->timeout_ms * millisecond;
  const SharedProgress& below = header_->progress_below;
  const int64_t progress_below = below.progress_time;
  if (progress_below >= 0 && now - progress_below < limit) return;
  int32_t culprit = below.busy;
  bool stuck = progress_below >= 0;
  for (const int32_t rank : local_) {
    const RankRegion& of = region(rank);
    if (of.phase != MIMO_RANK_PHASE_RUNNING) continue;
    if (now - of.progress_time < limit) return;
    stuck = true;
    if (of.waiting_call < 0 && (culprit < 0 || rank < culprit)) culprit = rank;
  }
  if (!stuck) return;
  char sentence[128];
  std::snprintf(sentence, sizeof(sentence), "%s for %.3g minutes",
                culprit < 0 ? "every rank waits for another one, without progress" : "it lives but made no progress",
                static_cast<double>(header_->timeout_ms) / 60'000);
  fail_unless_supervised(culprit, sentence);
}

}  // namespace mimo
