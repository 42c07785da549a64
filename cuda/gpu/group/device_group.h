// Groups of the nccl backend: tensors move through NCCL on separate streams; host values go through shared memory, or
// through NCCL if the members are on several hosts.
//
// Collectives share one communicator. Each pair of ranks that exchanges messages has one for each direction, so that a
// message waits only for its receiver; host values across hosts have one. Communicators are created at first use: one
// member posts the identifier on the run's board. A pair's first message creates both directions, because the other
// member may send first too; a first message without bytes creates its own direction only. A call is queued behind its
// stream's work, and mimo_group_wait makes the stream's later work wait for an event: the host does not block.
//
// A watch thread of the process polls the pending calls: it records finished calls in the flight recorder, publishes
// which call this rank waits for, and when the run has failed aborts NCCL's kernels and records the missing ranks.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "communicator.h"
#include "device.h"
#include "group.h"
#include "peer_rows.h"
#include "value_staging.h"

namespace mimo::cuda {

class DeviceGroup {
 public:
  DeviceGroup(Run& run, const std::string& name, std::vector<int32_t> ranks);
  ~DeviceGroup();

  int32_t size() const { return static_cast<int32_t>(ranks_.size()); }
  int32_t rank() const { return rank_; }

  void barrier();
  /// y [size, bytes] = every member's x, both in host memory. With y null it only contributes and does not wait.
  void exchange(const void* x, void* y, int64_t bytes);

  using Body = std::function<ncclResult_t(ncclComm_t, cudaStream_t)>;
  /// Queues a collective of all members behind the stream's work; returns its ticket.
  int64_t collective(mimo_stream& stream, int32_t kind, int64_t bytes, const Body& body);
  /// Without bytes, only connects to the receiver for this direction; the same holds for receive().
  int64_t send(mimo_stream& stream, const void* x, int64_t bytes, int32_t to);
  int64_t receive(mimo_stream& stream, void* x, int64_t bytes, int32_t from);
  /// Makes later work of the stream wait for the call.
  void wait(mimo_stream& stream, int64_t ticket);

  /// Access to the members' memory. Null at every member unless all GPUs reach each other's memory. The first call waits for
  /// all members.
  PeerRows* peer_rows();

  /// Polls the pending calls once. Returns number and start of the oldest, or -1. If the run has failed, `ended`
  /// receives the communicators to abort.
  std::pair<int64_t, int64_t> look(std::vector<ncclComm_t>& ended);

 private:
  struct Pending {
    int64_t sequence, number, started;
    cudaEvent_t done;
  };
  /// A sequence of calls that run in order.
  struct Line {
    std::unique_ptr<Communicator> communicator;
    int32_t peer = -1;  // peer's index; -1: all members
    int64_t started = 0;
    std::deque<Pending> pending;
  };
  /// Line numbers, part of tickets: all members, to a peer, from a peer, host values.
  static constexpr int32_t all = 0;
  int32_t to(int32_t peer) const { return 1 + peer; }
  int32_t from(int32_t peer) const { return 1 + size() + peer; }
  int32_t values() const { return 1 + 2 * size(); }
  int32_t line_numbers() const { return 2 + 2 * size(); }

  void prepare();
  uint64_t key_for(const std::string& what);
  Line& line_of_members(int32_t number, int32_t channels);
  Line& line_with(int32_t peer, bool sends, bool alone);
  void make_line_with(int32_t peer, bool sends);
  void exchange_between_hosts(int32_t kind, const void* x, void* y, int64_t bytes);
  int64_t start(mimo_stream& stream, int32_t number, Line& line, int32_t kind, int64_t bytes, const Body& body);
  cudaEvent_t queue(Line& line, int32_t kind, int64_t bytes, const Body& body);
  void forget_finished(Line& line);
  void note_missing();
  cudaEvent_t event();

  Run& run_;
  const std::string name_;
  const std::vector<int32_t> ranks_;
  const int32_t rank_;  // index in the group
  std::unique_ptr<Group> host_;  // if all members share memory
  std::vector<std::unique_ptr<ValueStaging>> staging_;  // if they do not, and for messages that connect
  std::mutex mutex_;
  std::map<int32_t, Line> lines_;
  std::vector<cudaEvent_t> events_;
  int32_t device_ = -1;
  bool noted_ = false;
  std::unique_ptr<PeerRows> peer_rows_;
  bool met_peers_ = false;
};

}  // namespace mimo::cuda
