// Group engine: the shared area, the queues of calls, the threads that advance them, and the flight recorder's entries.
#include "group.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

#include "processor.h"
#include "start_thread.h"
#include "status.h"

namespace mimo {
namespace {

/// A wait checks at least this often whether the run has failed.
constexpr int64_t look_milliseconds = 50;

}  // namespace

/// FNV-1a.
uint64_t hash(uint64_t state, const void* data, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) state = (state ^ at[i]) * 1099511628211ull;
  return state;
}

uint64_t group_key(const std::string& name, const std::vector<int32_t>& ranks) {
  const uint64_t of_name = hash(14695981039346656037ull, name.data(), name.size() + 1);
  return hash(of_name, ranks.data(), ranks.size() * sizeof(int32_t));
}

int32_t place_among(const std::vector<int32_t>& ranks, int32_t rank) {
  const auto at = std::find(ranks.begin(), ranks.end(), rank);
  return at == ranks.end() ? -1 : static_cast<int32_t>(at - ranks.begin());
}

const char* collective_name(int32_t kind) {
  static const char* const names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all",
                                      "send",       "receive",        "barrier",    "exchange",  "exchange_rows"};
  return kind >= 0 && kind < static_cast<int32_t>(std::size(names)) ? names[kind] : "call of an unknown kind";
}

Group::Group(Run& run, const std::string& name, std::vector<int32_t> ranks, TensorMemory& memory)
    : run_(run), memory_(memory), name_(name), ranks_(std::move(ranks)), rank_(place_among(ranks_, run.rank())),
      lanes_(1 + 2 * ranks_.size()) {
  MIMO_REQUIRE(size() >= 2, "mimo_group_create");
  MIMO_REQUIRE(rank_ >= 0, "mimo_group_create");
  for (const int32_t other : ranks_) {
    if (run.is_local(other)) continue;
    throw Error(MIMO_ERROR_UNSUPPORTED, "Ranks " + std::to_string(run.rank()) + " and " + std::to_string(other) +
                                            " are on different hosts, between which there is no shared memory: ranks " +
                                            "of several hosts need NCCL (--device cuda, --distributed-backend nccl).");
  }
  // A slot fits the nearest cache shared by two processes, and all slots of a usual layout fit a container's 64 MB.
  slot_bytes_ = std::max<int64_t>(64 << 10, (512 << 10) / size() / 64 * 64);
  // Spinning pays only if the other member has its own core.
  spin_nanoseconds_ = run.ranks() <= usable_cores() ? 50'000 : 2'000;
  key_ = group_key(name_, ranks_);
  const int64_t slot = static_cast<int64_t>(sizeof(SlotHeader)) + slot_bytes_;
  area_ = run.area(key_, size() * (static_cast<int64_t>(sizeof(Place)) + 2 * slot), "the group " + name_);
}

Group::~Group() {
  deliver();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  place(rank_).doorbell.ring();
  if (thread_.joinable()) thread_.join();
}

/// Writes out the values that a rank has given before it exits: a reader two rounds behind has no free slot for them
/// yet. A rank that exits before its work is done, or whose run fails, delivers no more values.
void Group::deliver() {
  if (run_.region(run_.rank()).phase.load() != MIMO_RANK_PHASE_FINISHED) return;
  waiting_.fetch_add(1);
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    while (failure_ == nullptr && !lanes_[collectives].calls.empty()) {
      if (!advance()) sleep(lock);
    }
  } catch (...) {
    fail(std::current_exception());
  }
  waiting_.fetch_sub(1);
}

SlotHeader& Group::slot_header(int32_t member, uint64_t of_round) const {
  char* slots = area_.address() + size() * static_cast<int64_t>(sizeof(Place));
  const int64_t index = 2 * member + static_cast<int64_t>(of_round & 1);
  return *reinterpret_cast<SlotHeader*>(slots + index * (static_cast<int64_t>(sizeof(SlotHeader)) + slot_bytes_));
}

char* Group::slot(int32_t member, uint64_t of_round) const {
  return reinterpret_cast<char*>(&slot_header(member, of_round) + 1);
}

char* Group::row_slot(int32_t member, uint64_t of_round) const {
  return row_area_->address() + (2 * member + static_cast<int64_t>(of_round & 1)) * row_slot_bytes();
}

// Rows are read once, so a slot need not stay in a cache. Every member waits for all others in each round, and larger
// slots take fewer rounds.
int64_t Group::row_slot_bytes() const { return std::max<int64_t>(64 << 10, (2 << 20) / size() / 64 * 64); }

void Group::open_row_slots() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (row_area_) return;
  static constexpr char of_rows[] = "rows";
  row_area_ = run_.area(hash(key_, of_rows, sizeof(of_rows)), 2 * size() * row_slot_bytes(), "rows exchanged in " + name_);
}

void Group::ring_others() const {
  for (int32_t member = 0; member < size(); ++member) {
    if (member != rank_) ring(member);
  }
}

Channel& Group::channel(int32_t from, int32_t to) {
  MIMO_REQUIRE(from >= 0 && from < size() && to >= 0 && to < size() && from != to, "A message between two members");
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = channels_.find({from, to});
  if (known != channels_.end()) return known->second;
  const int32_t pair[2] = {from, to};
  Channel made(run_.area(hash(key_, pair, sizeof(pair)), Channel::area_bytes(), "messages in " + name_));
  return channels_.emplace(std::pair{from, to}, std::move(made)).first->second;
}

std::string Group::describe(const Call& call) const {
  return name_ + " " + collective_name(call.kind()) + " " + std::to_string(call.sequence);
}

int64_t Group::start(int32_t lane_index, std::unique_ptr<Call> call) {
  run_.require_alive();
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  Lane& lane = lanes_[static_cast<size_t>(lane_index)];
  call->sequence = ++lane.started;
  call->ticket = call->sequence * static_cast<int64_t>(lanes_.size()) + lane_index;

  call->number = run_.begin_call(name_, call->sequence, call->kind(), call->bytes());

  const int64_t ticket = call->ticket;
  lane.calls.push_back(std::move(call));
  try {
    advance();
    if (thread_wanted()) {
      if (!thread_.joinable()) thread_ = start_thread([this] { work(); });
      work_.notify_one();
    }
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
  return ticket;
}

void Group::wait(int64_t ticket) {
  const auto count = static_cast<int64_t>(lanes_.size());
  const int64_t sequence = ticket / count;
  const Lane& lane = lanes_[static_cast<size_t>(ticket % count)];
  const auto done = [&] { return lane.finished >= sequence || failure_ != nullptr; };

  waiting_.fetch_add(1);
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    if (!done() && !spin(done)) {
      RankRegion& own = run_.region(run_.rank());
      own.waiting_call.store(lane.calls[static_cast<size_t>(sequence - lane.finished - 1)]->number);
      while (!done()) sleep(lock);
      own.waiting_call.store(-1);
    }
  } catch (...) {
    fail(std::current_exception());
  }
  waiting_.fetch_sub(1);
  if (thread_wanted()) work_.notify_one();
  if (lane.finished < sequence) std::rethrow_exception(failure_);
}

/// Advances the first call of every lane by one round. Returns whether any made progress.
bool Group::advance() {
  bool moved = false;
  for (Lane& lane : lanes_) {
    if (lane.calls.empty()) continue;
    moved = lane.calls.front()->advance(*this) || moved;
    if (lane.calls.front()->finished()) finish(lane);
  }
  return moved;
}

void Group::finish(Lane& lane) {
  run_.end_call(lane.calls.front()->number);
  lane.calls.pop_front();
  ++lane.finished;
}

/// Whether pending calls would stall without the group's thread.
bool Group::thread_wanted() const {
  if (failure_ != nullptr || waiting_.load() > 0) return false;
  return std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) {
    return lane.calls.size() > 1 || (lane.calls.size() == 1 && lane.calls.front()->needs_thread());
  });
}

void Group::fail(std::exception_ptr error) {
  if (failure_ != nullptr) return;
  failure_ = error;
  for (Lane& lane : lanes_) {
    if (lane.calls.empty()) continue;
    std::vector<int32_t> missing;
    for (const int32_t member : lane.calls.front()->missing(*this)) missing.push_back(ranks_[static_cast<size_t>(member)]);
    run_.fail_call(lane.calls.front()->number, missing);
  }
}

template <class Done>
bool Group::spin(Done&& done) {
  int64_t end = monotonic_nanoseconds() + spin_nanoseconds_;
  do {
    for (int i = 0; i < 64; ++i) {
      if (advance()) {
        if (done()) return true;
        // The other members are active: the next round is near.
        end = monotonic_nanoseconds() + spin_nanoseconds_;
      }
      __builtin_ia32_pause();
    }
    if (done()) return true;
  } while (monotonic_nanoseconds() < end);
  return false;
}

void Group::sleep(std::unique_lock<std::mutex>& lock) {
  Doorbell& doorbell = place(rank_).doorbell;
  doorbell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = doorbell.rings.load(std::memory_order_seq_cst);
  struct Awake {
    Doorbell& doorbell;
    ~Awake() { doorbell.sleepers.fetch_sub(1, std::memory_order_relaxed); }
  } awake{doorbell};
  if (advance()) return;
  run_.require_alive();
  lock.unlock();
  doorbell.sleep(seen, look_milliseconds);
  lock.lock();
}

/// The group's thread: advances calls while their callers do something else.
void Group::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_) {
    if (!thread_wanted()) {
      work_.wait(lock);
      continue;
    }
    try {
      if (!advance()) sleep(lock);
    } catch (...) {
      fail(std::current_exception());
    }
    // A caller in wait() takes over.
    if (waiting_.load() > 0) {
      lock.unlock();
      sched_yield();
      lock.lock();
    }
  }
}

}  // namespace mimo
