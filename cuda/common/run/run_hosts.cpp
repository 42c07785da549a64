// Functions of a run for several hosts: progress, the board, and waiting for the exchange of states after a failure.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "mimo/hosts.h"
#include "relay.h"
#include "run.h"
#include "status.h"

namespace mimo {
namespace {

/// Nanoseconds after a failure, a little more than the relays' own limits (relay_failure.cpp).
constexpr int64_t begun_timeout = 1'500'000'000;
constexpr int64_t settle_timeout = 2'800'000'000;

}  // namespace

ProgressSummary Run::progress_of_host() const {
  ProgressSummary summary{0, 0, -1, -1, -1, std::numeric_limits<int64_t>::max()};
  const int64_t now = monotonic_nanoseconds();
  for (const int32_t rank : local_) {
    const RankRegion& of = region(rank);
    const int32_t phase = of.phase;
    summary.step = std::min<int64_t>(summary.step, of.step);
    if (phase == MIMO_RANK_PHASE_ABSENT) {
      if (summary.absent < 0) summary.absent = rank;
      continue;
    }
    ++summary.joined;
    if (phase == MIMO_RANK_PHASE_FINISHED) ++summary.finished;
    if (phase != MIMO_RANK_PHASE_RUNNING) continue;
    if (summary.busy < 0 && of.waiting_call < 0) summary.busy = rank;
    const int64_t age = std::max<int64_t>(0, now - of.progress_time);
    summary.progress_age = summary.progress_age < 0 ? age : std::min(summary.progress_age, age);
  }
  return summary;
}

ProgressSummary Run::progress_of_run() const {
  if (!spans_hosts()) return progress_of_host();
  const SharedProgress& shared = header_->progress_of_run;
  const int64_t progress_time = shared.progress_time;
  const int64_t age = progress_time < 0 ? -1 : monotonic_nanoseconds() - progress_time;
  return {shared.joined, shared.finished, shared.absent, shared.busy, age, shared.step};
}

void Run::set_relay(std::unique_ptr<Relay> relay) {
  MIMO_REQUIRE(relay_ == nullptr, "mimo_run_relay (once per process)");
  relay_ = std::move(relay);
}

void Run::relayed(int64_t& sent, int64_t& received) const {
  sent = relay_ == nullptr ? 0 : relay_->sent();
  received = relay_ == nullptr ? 0 : relay_->received();
}

void Run::await_begun() const {
  const int64_t end = header_->failed_time + begun_timeout;
  while (!knows_begun() && monotonic_nanoseconds() < end) usleep(10'000);
}

void Run::settle() const {
  // Only a process that relays or prints has to wait, and no relay sets `settled` when the relaying rank has failed.
  const int32_t relaying = local_.front();
  if (relay_ == nullptr && (!may_diagnose() || header_->failed_rank == relaying)) return;
  const int64_t end = header_->failed_time + settle_timeout;
  while (spans_hosts() && header_->settled == 0 && monotonic_nanoseconds() < end) usleep(10'000);
}

bool Run::may_diagnose() const {
  return header_->own_host == 0 || (header_->root_lost != 0 && header_->own_host == 1);
}

void Run::post(uint64_t key, const void* value, int64_t bytes, PostingScope scope) {
  Posting posting{key, scope, 0, {}};
  MIMO_REQUIRE(bytes >= 0 && bytes <= static_cast<int64_t>(sizeof(posting.value)), "A posting");
  std::memcpy(posting.value, value, static_cast<size_t>(bytes));
  add_posting(posting);
}

void Run::add_posting(const Posting& added) {
  add_to_board(board().postings, [&](int64_t index) { posting(index) = added; });
}

/// Adds an entry to the board, which `write` writes at its index; `count`: the number of entries of its kind.
void Run::add_to_board(std::atomic<int64_t>& count, const std::function<void(int64_t)>& write) {
  lock_areas();
  const int64_t index = count.load(std::memory_order_relaxed);
  const bool fits = index < board_capacity(header_->local_ranks);
  if (fits) {
    write(index);
    count.store(index + 1, std::memory_order_release);
  }
  header_->lock.store(0, std::memory_order_release);
  if (!fits) fail(-1, "A host has room for 1024 groups and pairs that communicate through NCCL, and for 64 more per rank.");
  if (!fits) require_alive();
}

void Run::await_posting(uint64_t key, void* value, int64_t bytes, PostingScope scope) {
  const Board& all = board();
  bool requested = scope == PostingScope::host || !spans_hosts();
  for (int64_t at = 0;;) {
    const int64_t count = all.postings.load(std::memory_order_acquire);
    for (; at < count; ++at) {
      if (posting(at).key != key) continue;
      std::memcpy(value, posting(at).value, static_cast<size_t>(bytes));
      return;
    }
    if (!requested) add_to_board(board().requests, [&](int64_t index) { requested_key(index) = key; });
    requested = true;
    require_alive();
    usleep(100);
  }
}

void Run::claim_gpu(const char* gpu) {
  lock_areas();
  int32_t other = -1;
  for (const int32_t rank : local_) {
    if (rank != rank_ && std::strcmp(region(rank).gpu, gpu) == 0) other = rank;
  }
  RankRegion& own = region(rank_);
  copy_string(own.gpu, sizeof(own.gpu), gpu);
  header_->lock.store(0, std::memory_order_release);
  if (other < 0) return;
  // NCCL's own error would be "invalid usage".
  throw Error(MIMO_ERROR_UNSUPPORTED, "Ranks " + std::to_string(std::min(other, rank_)) + " and " +
                                          std::to_string(std::max(other, rank_)) + " use the same GPU (" + gpu +
                                          "), which NCCL refuses; with --distributed-backend shm ranks may share GPUs.");
}

}  // namespace mimo

using mimo::guard;

extern "C" {

int32_t mimo_run_create_part(int32_t ranks, const int32_t* host_of_rank, int32_t own_host, int64_t timeout_ms, char* path,
                             mimo_run** run) {
  return guard([&] {
    auto made = std::make_unique<mimo_run>(ranks, host_of_rank, own_host, timeout_ms);
    mimo::copy_string(path, MIMO_RUN_PATH_BYTES, made->run.path().c_str());
    *run = made.release();
  });
}

int32_t mimo_run_relay(mimo_run* run, const uint8_t* key, const char* parent, int32_t parent_port, const char* address,
                       int32_t* port) {
  return guard([&] {
    std::unique_ptr<mimo::Link> link;
    if (run->run.header().own_host > 0) link = mimo::connect_to_parent(run->run, parent, parent_port, key);
    auto relay = std::make_unique<mimo::Relay>(run->run, key, std::move(link), mimo::listen_for_children(run->run, address));
    *port = relay->port();
    run->run.set_relay(std::move(relay));
  });
}

int32_t mimo_run_outlook(mimo_run* run, int64_t* joined, int64_t* finished, int64_t* step) {
  return guard([&] {
    const mimo::ProgressSummary progress = run->run.progress_of_run();
    *joined = progress.joined;
    *finished = progress.finished;
    *step = progress.step;
  });
}

int32_t mimo_run_relayed(mimo_run* run, int64_t* sent, int64_t* received) {
  return guard([&] { run->run.relayed(*sent, *received); });
}

int32_t mimo_run_settle(mimo_run* run) {
  return guard([&] { run->run.settle(); });
}

}  // extern "C"
