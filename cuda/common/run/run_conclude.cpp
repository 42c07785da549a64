// End of a rank of a failed run: decides which process prints the diagnosis, and kills a failed rank that does not end.
#include <poll.h>
#include <unistd.h>

#include <algorithm>

#include "process_status.h"
#include "run.h"
#include "status.h"

namespace mimo {
namespace {

/// Time for all ranks of this host to record what they waited for.
constexpr int64_t record_time = 400 * millisecond;
/// Most time that a rank waits for the diagnosis to be printed: the program that started the ranks may kill all with the first
/// that ends.
constexpr int64_t print_time = 1200 * millisecond;
/// Most time without a byte being accepted by the terminal, or another reader of the diagnosis.
constexpr int32_t write_limit_ms = 1000;
/// Bytes that a pipe accepts without blocking when poll() reports it writable.
constexpr size_t write_piece = 4096;

/// States of RunHeader::claimed.
constexpr int32_t claimed = 1;
constexpr int32_t printed = 2;

/// Writes `text` as far as the reader accepts it in time: a reader that does not read must not keep this process alive.
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
  int32_t unclaimed = 0;
  return may_diagnose() && header_->diagnosis_state.compare_exchange_strong(unclaimed, claimed);
}

void Run::conclude(int32_t exit_code) {
  MIMO_REQUIRE(failed(), "mimo_run_conclude");
  exit_code_ = exit_code;
  std::call_once(concluded_, [this] {
    write_recording();
    if (supervisor_is_alive()) return;
    const int64_t recorded = monotonic_nanoseconds() + record_time;
    const int64_t latest = monotonic_nanoseconds() + print_time;
    const bool prints = claim_diagnosis();
    const int64_t heartbeat = failed_rank_heartbeat();
    settle();
    while (monotonic_nanoseconds() < recorded) usleep(10'000);
    if (prints) print_diagnosis();
    // Several hosts: a failed rank is not killed early, because other hosts should detect its silence, not a closed connection.
    while (monotonic_nanoseconds() < latest && (spans_hosts() || header_->diagnosis_state != printed)) usleep(10'000);
    kill_failed_rank(heartbeat);
  });
}

/// Whether the launcher still polls: then it prints the diagnosis and kills ranks that do not end. Waits until that is known.
bool Run::supervisor_is_alive() const {
  if (header_->supervised == 0) return false;
  const int64_t polls = header_->supervisor_polls;
  // A launcher that has never polled, as in tests, counts as alive.
  if (polls == 0) return true;
  // The heartbeat thread stops measuring the launcher's silence at the failure.
  const int64_t end = monotonic_nanoseconds() + longest_silence - supervisor_silent_;
  while (header_->supervisor_polls == polls) {
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
  const int32_t failed_rank = header_->failed_rank;
  return failed_rank < 0 || !is_local(failed_rank) ? 0 : region(failed_rank).heartbeat.load();
}

/// Kills the failed rank if its heartbeat has not changed from `heartbeat`: a stopped process cannot end itself, and without a
/// launcher no other process would end it.
void Run::kill_failed_rank(int64_t heartbeat) const {
  const int32_t failed_rank = header_->failed_rank;
  if (failed_rank < 0 || failed_rank == rank_ || !is_local(failed_rank) || header_->failed_by == failed_rank) return;
  const RankRegion& of = region(failed_rank);
  if (of.process_start_time != 0 && of.heartbeat == heartbeat) kill_process(of.pid, of.process_start_time);
}

}  // namespace mimo
