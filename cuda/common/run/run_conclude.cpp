// Ends a rank of a run that has failed: decides which process prints the diagnosis, and ends ranks that do not notice.
#include <poll.h>
#include <unistd.h>

#include <algorithm>

#include "process_look.h"
#include "run.h"
#include "status.h"

namespace mimo {
namespace {

/// Until all ranks have noted where they waited.
constexpr int64_t note_time = 400 * millisecond;
/// Waits until the diagnosis is printed: the program that started the ranks may end all of them with the first.
constexpr int64_t print_time = 1200 * millisecond;
/// For the terminal, or whatever reads standard error, to take the diagnosis.
constexpr int32_t write_limit_ms = 1000;
/// More may not be taken at once by a pipe that is said to take something.
constexpr size_t write_piece = 4096;

/// States of RunHeader::claimed.
constexpr int32_t claimed = 1;
constexpr int32_t printed = 2;

/// Writes as much as is taken in time: a reader that sleeps must not keep this process alive.
void write_with_timeout(int file, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    pollfd ready{file, POLLOUT, 0};
    if (poll(&ready, 1, write_limit_ms) <= 0 || (ready.revents & POLLOUT) == 0) return;
    const ssize_t count = write(file, text.data() + done, std::min(write_piece, text.size() - done));
    if (count < 0) return;
    done += static_cast<size_t>(count);
  }
}

}  // namespace

bool Run::claim_diagnosis() {
  int32_t nobody = 0;
  return may_diagnose() && header_->diagnosis_state.compare_exchange_strong(nobody, claimed);
}

void Run::conclude(int32_t exit_code) {
  MIMO_REQUIRE(failed(), "mimo_run_conclude");
  exit_code_ = exit_code;
  std::call_once(concluded_, [this] {
    write_recording();
    if (supervisor_is_alive()) return;
    const int64_t noted = monotonic_nanoseconds() + note_time;
    const int64_t told = monotonic_nanoseconds() + print_time;
    const bool prints = claim_diagnosis();
    const int64_t beats = failed_rank_heartbeat();
    settle();
    while (monotonic_nanoseconds() < noted) usleep(10'000);
    if (prints) print_diagnosis();
    // Other hosts see for themselves that a rank is silent; one that is killed before has only closed its connection.
    while (monotonic_nanoseconds() < told && (spans_hosts() || header_->diagnosis_state != printed)) usleep(10'000);
    kill_failed_rank(beats);
  });
}

/// A launcher that still looks prints the diagnosis itself and kills ranks that stay. A stopped launcher does neither.
bool Run::supervisor_is_alive() const {
  if (header_->supervised == 0) return false;
  const int64_t looks = header_->supervisor_polls;
  // A launcher that has never looked is a test's, and does not count.
  if (looks == 0) return true;
  // Since the failure the heart has not looked for it.
  const int64_t end = monotonic_nanoseconds() + longest_silence - supervisor_silent_;
  while (header_->supervisor_polls == looks) {
    if (monotonic_nanoseconds() >= end) return false;
    usleep(10'000);
  }
  return true;
}

void Run::print_diagnosis() {
  write_with_timeout(diagnosis_file_, "mimo: " + diagnosis_of(*this) + "\n");
  header_->diagnosis_state = printed;
}

int64_t Run::failed_rank_heartbeat() const {
  const int32_t blamed = header_->failed_rank;
  return blamed < 0 || !is_local(blamed) ? 0 : region(blamed).heartbeat.load();
}

/// A rank that is stopped, or whose heart does not beat, does not end by itself, and no launcher may be there to end it.
void Run::kill_failed_rank(int64_t beats) const {
  const int32_t blamed = header_->failed_rank;
  if (blamed < 0 || blamed == rank_ || !is_local(blamed) || header_->failed_by == blamed) return;
  const RankRegion& of = region(blamed);
  if (of.started != 0 && of.heartbeat == beats) kill_process(of.pid, of.started);
}

}  // namespace mimo
