// The parts of a run's shared file for several hosts: the host of each rank, the board, and the end that hosts agree
// on.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "mimo_hosts.h"
#include "relay.h"
#include "run.h"
#include "status.h"

namespace mimo {
namespace {

/// A little more than the relays take.
constexpr int64_t mirror_limit = 1'500'000'000;
constexpr int64_t settle_limit = 2'800'000'000;

}  // namespace

void Run::place(const int32_t* host_of_rank, int32_t own_host) {
  int32_t hosts = 0;
  for (int32_t rank = 0; rank < ranks(); ++rank) {
    MIMO_REQUIRE(host_of_rank[rank] >= 0, "mimo_run_place");
    hosts = std::max(hosts, host_of_rank[rank] + 1);
  }
  MIMO_REQUIRE(host_of_rank[0] == 0, "mimo_run_place");
  MIMO_REQUIRE(own_host >= 0 && own_host < hosts, "mimo_run_place");
  for (int32_t rank = 0; rank < ranks(); ++rank) region(rank).host_index = host_of_rank[rank];
  header_->own_host = own_host;
  header_->hosts = hosts;
}

void Run::relay_through(std::unique_ptr<Relay> relay) {
  MIMO_REQUIRE(relay_ == nullptr, "mimo_run_listen, mimo_run_connect (once a process)");
  relay_ = std::move(relay);
}

void Run::await_mirrored() const {
  const int64_t end = header_->failed_time + mirror_limit;
  while (!mirrored() && monotonic_nanoseconds() < end) usleep(10'000);
}

void Run::settle() const {
  // A process waits only if it relays or prints, and not if the rank that relays here is the one that has failed.
  int32_t relaying = 0;
  while (!is_local(relaying)) ++relaying;
  if (relay_ == nullptr && (!may_diagnose() || header_->failed_rank == relaying)) return;
  const int64_t end = header_->failed_time + settle_limit;
  while (spans_hosts() && header_->settled == 0 && monotonic_nanoseconds() < end) usleep(10'000);
}

bool Run::may_diagnose() const {
  return header_->own_host == 0 || (header_->centre_lost != 0 && header_->own_host == 1);
}

void Run::post(uint64_t key, const void* value, int64_t bytes) {
  Posting posting{};
  posting.key = key;
  posting.host_index = header_->own_host;
  MIMO_REQUIRE(bytes >= 0 && bytes <= static_cast<int64_t>(sizeof(posting.value)), "A posting");
  std::memcpy(posting.value, value, static_cast<size_t>(bytes));
  take_posting(posting);
}

void Run::take_posting(const Posting& posting) {
  lock_areas();
  Board& all = board();
  const int64_t count = all.count.load(std::memory_order_relaxed);
  const bool fits = count < board_capacity(ranks());
  if (fits) {
    all.postings[count] = posting;
    all.count.store(count + 1, std::memory_order_release);
  }
  header_->lock.store(0, std::memory_order_release);
  if (!fits) fail(-1, "A run's ranks make at most 256 + 16 groups and pairs a rank that talk through NCCL.");
  if (!fits) require_alive();
}

void Run::read_posted(uint64_t key, void* value, int64_t bytes) const {
  const Board& all = board();
  for (int64_t at = 0;;) {
    const int64_t count = all.count.load(std::memory_order_acquire);
    for (; at < count; ++at) {
      if (all.postings[at].key != key) continue;
      std::memcpy(value, all.postings[at].value, static_cast<size_t>(bytes));
      return;
    }
    require_alive();
    usleep(100);
  }
}

void Run::claim_gpu(const char* gpu) {
  lock_areas();
  int32_t other = -1;
  for (int32_t rank = 0; rank < ranks(); ++rank) {
    if (rank != rank_ && is_local(rank) && std::strcmp(region(rank).gpu, gpu) == 0) other = rank;
  }
  RankRegion& own = region(rank_);
  copy_string(own.gpu, sizeof(own.gpu), gpu);
  header_->lock.store(0, std::memory_order_release);
  if (other < 0) return;
  // NCCL would say "invalid usage".
  throw Error(MIMO_ERROR_UNSUPPORTED, "Ranks " + std::to_string(std::min(other, rank_)) + " and " +
                                          std::to_string(std::max(other, rank_)) + " use the same GPU (" + gpu +
                                          "), which NCCL refuses; with --distributed-backend shm ranks may share GPUs.");
}

}  // namespace mimo

using mimo::guard;

extern "C" {

int32_t mimo_run_place(mimo_run* run, const int32_t* host_of_rank, int32_t own_host) {
  return guard([&] { run->run.place(host_of_rank, own_host); });
}

int32_t mimo_run_listen(mimo_run* run, const char* address, const uint8_t* key, int32_t* port) {
  return guard([&] {
    std::unique_ptr<mimo::Relay> relay = mimo::listen_for_hosts(run->run, address, key);
    *port = relay->port();
    run->run.relay_through(std::move(relay));
  });
}

int32_t mimo_run_connect(mimo_run* run, const char* address, int32_t port, const uint8_t* key) {
  return guard([&] { run->run.relay_through(mimo::connect_to_centre(run->run, address, port, key)); });
}

int32_t mimo_run_settle(mimo_run* run) {
  return guard([&] { run->run.settle(); });
}

}  // extern "C"
