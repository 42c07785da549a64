// Whether the ranks of a run live: each one's heartbeat, and the look at everybody.
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>

#include "run.h"
#include "status.h"

namespace mimo {
namespace {

constexpr int64_t millisecond = 1'000'000;
constexpr int64_t beat_interval = 200 * millisecond;
/// A rank silent for this long has failed: together with the time to end the others less than ten seconds.
constexpr int64_t silence_limit = 5000 * millisecond;
/// Of another host, which judges its own ranks before this and tells (and is itself judged by its relay before this). Otherwise
/// a host whose relay's process is stopped would blame those that it does not hear of any more.
constexpr int64_t far_silence_limit = 6000 * millisecond;
/// A look counts at most this much silence: when everything was stopped (a laptop's lid, Ctrl-Z), nobody is to blame.
constexpr int64_t longest_look = 1000 * millisecond;
/// How long the others of a failed run may take to notice by themselves.
constexpr int64_t grace = 5000 * millisecond;
/// Ranks that nobody starts here must have joined by then.
constexpr int64_t join_limit = 60'000 * millisecond;
/// Exit code of a rank that ends because of another one (EX_TEMPFAIL).
constexpr int ended_by_another = 75;

void sleep_for(int64_t nanoseconds) { usleep(static_cast<useconds_t>(nanoseconds / 1000)); }

/// State letter of a process in /proc ('T' stopped, 'Z' zombie); 0 when there is no such process.
char process_state(int32_t pid) {
  char path[64], text[512];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  FILE* file = std::fopen(path, "r");
  if (file == nullptr) return 0;
  const size_t length = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  text[length] = 0;
  // "pid (name) S ...": the name may hold anything, so the last parenthesis counts.
  const char* end = std::strrchr(text, ')');
  return end != nullptr && end[1] == ' ' ? end[2] : 0;
}

}  // namespace

void Run::join(int32_t rank) {
  MIMO_REQUIRE(rank_ < 0, "mimo_run_join (once a process)");
  require_alive();
  RankRegion& own = region(rank);
  if (own.phase != MIMO_RANK_PHASE_ABSENT) {
    throw Error(MIMO_ERROR_PEER, "Rank " + std::to_string(rank) + " has joined this run already (process " +
                                     std::to_string(own.pid) + ").");
  }
  rank_ = rank;
  gethostname(own.host, sizeof(own.host) - 1);
  own.pid = getpid();
  own.progress_time = monotonic_nanoseconds();
  own.phase = MIMO_RANK_PHASE_RUNNING;
  heart_ = std::thread([this] { beat(); });
}

void Run::leave() {
  if (rank_ >= 0 && region(rank_).phase == MIMO_RANK_PHASE_RUNNING) region(rank_).phase = MIMO_RANK_PHASE_FINISHED;
  if (recording_.load() >= 0) unlink(recording_path_.c_str());
}

/// The heart: its own thread, because the training thread may compute for minutes.
void Run::beat() {
  RankRegion& own = region(rank_);
  while (!stop_) {
    own.heartbeat.fetch_add(1, std::memory_order_relaxed);
    if (header_->supervised == 0) watch();
    write_recording();
    if (failed() && monotonic_nanoseconds() - header_->failed_time > grace) {
      // The training thread computes or hangs elsewhere; it had its time to end by itself.
      std::fflush(nullptr);
      _exit(ended_by_another);
    }
    sleep_for(beat_interval);
  }
}

void Run::watch() {
  if (failed()) return;
  const int64_t now = monotonic_nanoseconds();
  const int64_t elapsed = last_watch_ == 0 ? 0 : std::min(now - last_watch_, longest_look);
  last_watch_ = now;
  watched_.resize(static_cast<size_t>(ranks()));
  for (int32_t rank = 0; rank < ranks(); ++rank) watch_rank(rank, elapsed, now);
  watch_progress(now);
}

void Run::watch_rank(int32_t rank, int64_t elapsed, int64_t now) {
  RankRegion& of = region(rank);
  const bool local = is_local(rank);
  // The host of rank 0 watches all, the others their own ranks and rank 0.
  if (!local && header_->own_host != 0 && rank != 0) return;
  const int32_t phase = of.phase;
  if (phase == MIMO_RANK_PHASE_FINISHED || phase == MIMO_RANK_PHASE_FAILED) return;
  Watched& seen = watched_[static_cast<size_t>(rank)];
  const int64_t heartbeat = of.heartbeat;
  const int32_t pid = of.pid;
  if (pid == 0) {
    if (now - header_->created > join_limit) fail(rank, "it has not joined within 60 s");
    return;
  }
  const char state = local ? process_state(pid) : 'S';
  // A launcher hears of a death itself, with the signal.
  if (state == 0 || state == 'Z') {
    if (header_->supervised == 0 && of.phase != MIMO_RANK_PHASE_FINISHED) fail(rank, "its process has ended");
    return;
  }
  const bool beats = phase == MIMO_RANK_PHASE_RUNNING && heartbeat != seen.heartbeat;
  // One that has not joined may still be starting: only being stopped counts.
  const bool starting = phase == MIMO_RANK_PHASE_ABSENT && state != 'T';
  seen.heartbeat = heartbeat;
  seen.silent = beats || starting ? 0 : seen.silent + elapsed;
  if (seen.silent < (local ? silence_limit : far_silence_limit)) return;
  fail(rank, state == 'T' ? "it was stopped (SIGSTOP or SIGTSTP) for 5 s" : "its heartbeat has been silent for 5 s");
}

/// Nobody gets on: whoever waits for others is innocent as long as somebody does not wait.
void Run::watch_progress(int64_t now) {
  if (header_->own_host != 0) return;  // the host of rank 0 knows of all
  const int64_t limit = header_->timeout_ms * millisecond;
  int32_t culprit = -1;
  bool stuck = false;
  for (int32_t rank = 0; rank < ranks(); ++rank) {
    const RankRegion& of = region(rank);
    if (of.phase != MIMO_RANK_PHASE_RUNNING) continue;
    if (now - of.progress_time < limit) return;
    stuck = true;
    if (culprit < 0 && of.waiting_call < 0) culprit = rank;
  }
  if (!stuck) return;
  char sentence[128];
  std::snprintf(sentence, sizeof(sentence), "%s for %.3g minutes",
                culprit < 0 ? "every rank waits for another one, without progress" : "it lives but made no progress",
                static_cast<double>(header_->timeout_ms) / 60'000);
  fail(culprit, sentence);
}

}  // namespace mimo
