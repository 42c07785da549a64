// Groups of processes on one host with collectives through shared memory. The CPU library moves tensors this way; the
// CUDA library moves barriers and host values, and tensors too if ranks share a GPU.
//
// A group's shared area holds two counters and two slots for each member. Every collective is split into rounds, whose
// number all members know. In round r a member
//   1. waits until all members have read its slot r mod 2, last written in round r - 2 (`read` >= r - 2),
//   2. writes its part into that slot and publishes `written` = r,
//   3. waits until the members it needs have written round r, reads their slots and publishes `read` = r.
// A member waits on the doorbell of its own place; a member that publishes rings the doorbells of the others.
//
// A started call makes progress by itself: a call of one round writes its slot at once and needs no thread until it is
// waited for; longer calls are advanced by a thread of the group, or by the caller if it is already waiting.
#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "run.h"
#include "tensor_memory.h"

namespace mimo {

class Group;

/// Continues the hash `state` with these bytes.
uint64_t hash(uint64_t state, const void* data, size_t bytes);
/// Key of a group, equal at all members.
uint64_t group_key(const std::string& name, const std::vector<int32_t>& ranks);
/// Index of `rank` in `ranks`, or -1.
int32_t place_among(const std::vector<int32_t>& ranks, int32_t rank);

/// "all_reduce" etc. for MIMO_COLLECTIVE_*. Accepts any number, because recordings and other hosts may hold any.
const char* collective_name(int32_t kind);

/// A member's place in the shared area.
struct Place {
  Doorbell doorbell;
  alignas(64) std::atomic<uint64_t> written;  // rounds
  std::atomic<uint64_t> read;
};

/// Describes a slot's content, to detect disagreement between members.
struct alignas(64) SlotHeader {
  int64_t sequence;
  int64_t bytes;
  int32_t kind;
  int32_t detail;
};

/// A pending call. `lane` is the queue that it is in: 0 for collectives, then one for each peer and direction.
class Call {
 public:
  Call(int32_t kind, int64_t bytes) : kind_(kind), bytes_(bytes) {}
  virtual ~Call() = default;
  /// Advances by at most one round. Returns whether it made progress.
  virtual bool advance(Group& group) = 0;
  virtual bool finished() const = 0;
  /// Whether rounds are left after start().
  virtual bool needs_thread() const = 0;
  /// Members whose part is missing.
  virtual std::vector<int32_t> missing(const Group& group) const = 0;

  int32_t kind() const { return kind_; }
  int64_t bytes() const { return bytes_; }

  int64_t ticket = 0;
  int64_t sequence = 0;  // within its lane
  int64_t number = 0;    // within the rank's calls: index of its record

 private:
  int32_t kind_;
  int64_t bytes_;
};

struct ChannelHead;

/// The messages from one member to another.
class Channel {
 public:
  explicit Channel(Mapping area) : area_(std::move(area)) {}
  ChannelHead& head() const;
  /// Memory of the index-th chunk of all messages so far.
  char* chunk(uint64_t index) const;
  static int64_t area_bytes();

 private:
  Mapping area_;
};

class Group {
 public:
  /// `memory`: memory of the tensors of its collectives and messages.
  Group(Run& run, const std::string& name, std::vector<int32_t> ranks, TensorMemory& memory = host_memory());
  ~Group();

  int32_t size() const { return static_cast<int32_t>(ranks_.size()); }
  int32_t rank() const { return rank_; }
  const std::string& name() const { return name_; }
  const std::vector<int32_t>& ranks() const { return ranks_; }
  Run& run() const { return run_; }
  TensorMemory& memory() const { return memory_; }

  /// Queues a call; returns its ticket. `lane`: see Call.
  int64_t start(int32_t lane, std::unique_ptr<Call> call);
  /// Returns when the call is done, advancing it meanwhile. Throws the call's error.
  void wait(int64_t ticket);

  static constexpr int32_t collectives = 0;
  int32_t lane_to(int32_t peer) const { return 1 + peer; }
  int32_t lane_from(int32_t peer) const { return 1 + size() + peer; }

  // Used by calls: the shared area.
  Place& place(int32_t member) const { return reinterpret_cast<Place*>(area_.address())[member]; }
  SlotHeader& slot_header(int32_t member, uint64_t round) const;
  char* slot(int32_t member, uint64_t round) const;
  int64_t slot_bytes() const { return slot_bytes_; }
  /// Slots for row exchanges, larger than slot(), in an area that the group's first exchange creates.
  char* row_slot(int32_t member, uint64_t round) const;
  int64_t row_slot_bytes() const;
  /// Maps the area of row_slot(). Throws if the run's shared memory is too small for it.
  void open_row_slots();
  /// Number of the next round of collectives.
  uint64_t round = 1;
  void ring(int32_t member) const { place(member).doorbell.ring(); }
  void ring_others() const;
  /// Channel between a pair that includes this member. Throws for other pairs.
  Channel& channel(int32_t from, int32_t to);
  /// The call's name in error messages: "language.tp all_reduce 12".
  std::string describe(const Call& call) const;

 private:
  struct Lane {
    std::deque<std::unique_ptr<Call>> calls;
    int64_t started = 0;
    int64_t finished = 0;
  };
  bool advance();
  void finish(Lane& lane);
  bool thread_wanted() const;
  void fail(std::exception_ptr error);
  /// Sleeps until a member publishes something. The lock is held on entry and on return.
  void sleep(std::unique_lock<std::mutex>& lock);
  template <class Done>
  bool spin(Done&& done);
  void work();
  void deliver();

  Run& run_;
  TensorMemory& memory_;
  std::string name_;
  std::vector<int32_t> ranks_;
  int32_t rank_;
  uint64_t key_;  // of its shared areas
  int64_t slot_bytes_;
  int64_t spin_nanoseconds_;
  Mapping area_;
  std::optional<Mapping> row_area_;
  std::vector<Lane> lanes_;
  std::map<std::pair<int32_t, int32_t>, Channel> channels_;

  std::mutex mutex_;
  std::exception_ptr failure_;
  std::atomic<int32_t> waiting_{0};  // callers in wait(): the thread leaves the work to them
  std::condition_variable work_;
  std::thread thread_;
  bool stop_ = false;
};

}  // namespace mimo
