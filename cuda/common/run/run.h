// A run: its shared memory, the detection of failed ranks, and the diagnosis of a failure.
//
// The ranks of one host share an unnamed file in /dev/shm, mapped by every rank and by the launcher (run_layout.h). It holds a
// header with the failure of the run, a region with the state of each rank, flight recorders with the latest collective calls, a
// board through which ranks exchange small values, and areas that groups allocate. The system deletes the file with the last
// process that has it open.
//
// A run of several hosts has such a file on each host. It also has regions for the ranks of hosts below in the tree of hosts and
// for the ranks of host 0: copies, which the relays update (relay.h). So the file of host 0 has the regions of all ranks, and a
// process only ever reads the file of its own host.
#pragma once
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "mimo/collectives.h"
#include "run_layout.h"

namespace mimo {

/// A mapped part of a file.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int file, int64_t offset, int64_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept : address_(other.address_), bytes_(other.bytes_) { other.address_ = nullptr; }
  Mapping& operator=(Mapping&& other) noexcept;
  char* address() const { return static_cast<char*>(address_); }

 private:
  void* address_ = nullptr;
  int64_t bytes_ = 0;
};

class Relay;

class Run {
 public:
  /// Creates the file of a run on one host.
  Run(int32_t ranks, bool supervised, int64_t timeout_ms);
  /// Creates the file of host `own_host` for a run of several hosts. `host_of_rank` [ranks]; rank 0 is on host 0.
  Run(int32_t ranks, const int32_t* host_of_rank, int32_t own_host, int64_t timeout_ms);
  /// Opens the file that another process has created.
  explicit Run(const std::string& path);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// The path by which other processes of this host open the file while this process lives.
  std::string path() const;
  RunHeader& header() const { return *header_; }
  /// `rank`: a known rank.
  RankRegion& region(int32_t rank) const;
  /// Whether this host's file has a region for the rank: for ranks of this host, of hosts below it, and of host 0.
  bool knows(int32_t rank) const { return location_of(rank).region >= 0; }
  /// Recorded calls of a known rank, newest first: at most `flight_records` of a rank of this host, `reported_calls` of others.
  std::vector<const mimo_call_record*> calls_of(int32_t rank) const;
  FlightRecorder& flight(int32_t local_rank) const;
  RemoteCalls& remote_calls(int32_t known_rank) const;
  int32_t ranks() const { return header_->ranks; }
  /// This process's rank; throws before join().
  int32_t rank() const;
  bool joined() const { return rank_ >= 0; }

  /// Makes this process `rank` and starts its heartbeat thread, which ends the process with `exit_code` if the run has failed and
  /// the training thread does not end.
  void join(int32_t rank, int32_t exit_code);
  void leave();
  /// Called by the launcher: process `pid` will be `rank`.
  void expect(int32_t rank, int32_t pid);
  /// Called when the run has failed, before this rank ends with `exit_code`. Returns when the diagnosis has been printed, or after
  /// some seconds. This rank prints it if neither a launcher nor another rank does.
  void conclude(int32_t exit_code);
  /// Sets the descriptor that this process prints the diagnosis to, by default standard error.
  void print_to(int32_t file) { diagnosis_file_ = file; }
  /// Whether this process is to print the diagnosis: true for the first caller of all processes.
  bool claim_diagnosis();

  /// Transport of tensors between GPUs in groups that this process creates: MIMO_BACKEND_*.
  int32_t backend = MIMO_BACKEND_NCCL;
  mimo_device* device = nullptr;

  bool failed() const { return header_->failed.load(std::memory_order_acquire) != 0; }
  /// Declares the run failed, unless it has failed already. `rank`: the rank to blame, or -1. Returns whether this call did.
  bool fail(int32_t rank, const std::string& sentence);
  /// Throws MIMO_ERROR_PEER with the reason when the run has failed.
  void require_alive() const;
  /// Records the start of a collective of this rank in its flight recorder. Returns the number of the call.
  int64_t begin_call(const std::string& group, int64_t sequence, int32_t kind, int64_t bytes);
  /// Records the end of a call: the rank has made progress.
  void end_call(int64_t number);
  /// Records that a call failed because these ranks had not begun it.
  void fail_call(int64_t number, const std::vector<int32_t>& missing);
  /// Records that this rank has begun a collective of a group with members on other hosts, which learn it if the run fails.
  void record_begun(const std::string& group, int64_t sequence, int32_t kind);
  /// Whether a rank has begun a collective of this group with this sequence number or a later one. `values`: of host values, which
  /// are counted apart from tensors. For ranks on other hosts only valid if knows_begun().
  bool has_begun(int32_t rank, const std::string& group, bool values, int64_t sequence) const;
  /// Checks every rank of this host, and fails the run when a rank is dead, stopped, silent or makes no progress. In a run with a
  /// launcher, a rank fails it only when the launcher has stopped polling.
  void watch();
  /// watch() as called by the launcher, which also shows the ranks that it is alive.
  void supervise();

  /// The heartbeat thread writes a recording of this rank to `path` from now on.
  void record_to(const std::string& path);
  /// Writes a recording of any rank to `path`, once. Called by the launcher when the run has failed.
  void record_rank(int32_t rank, const std::string& path) const;
  /// Copies a rank's state from a recording into this run.
  void restore(int32_t rank, const Recording::Recorded& recorded);

  // Runs of several hosts.
  bool spans_hosts() const { return header_->hosts > 1; }
  int32_t host_of(int32_t rank) const { return location_of(rank).host; }
  bool is_local(int32_t rank) const { return host_of(rank) == header_->own_host; }
  /// This host's ranks, ascending.
  const std::vector<int32_t>& local_ranks() const { return local_; }
  /// Progress of this host's ranks, and of all ranks as last received from the root.
  ProgressSummary progress_of_host() const;
  ProgressSummary progress_of_run() const;
  /// This process runs the relay of its host from now on.
  void set_relay(std::unique_ptr<Relay> relay);
  /// Messages that this process's relay has sent and received.
  void relayed(int64_t& sent, int64_t& received) const;
  /// After a failure: whether the collectives that ranks of other hosts had begun are known on this host.
  bool knows_begun() const { return !spans_hosts() || header_->begun_known != 0; }
  /// Waits until knows_begun(), or until the relays have given up.
  void await_begun() const;
  /// After a failure: waits until the hosts have exchanged the states of their ranks, at most some seconds.
  void settle() const;
  /// Whether the diagnosis is printed on this host: host 0, or host 1 when the connection to host 0 is lost.
  bool may_diagnose() const;

  /// Posts a value of `bytes` (at most 256) bytes under `key`, which must be new.
  void post(uint64_t key, const void* value, int64_t bytes, PostingScope scope);
  /// Waits for the posting of `key` and copies its value. `scope` as of the rank that posts. Throws when the run fails.
  void await_posting(uint64_t key, void* value, int64_t bytes, PostingScope scope);
  /// Adds a posting to this host's board.
  void add_posting(const Posting& posting);
  Board& board() const;
  Posting& posting(int64_t index) const;
  uint64_t& requested_key(int64_t index) const;
  BegunRange* begun_ranges() const;
  /// The number of earlier calls with this key in this process. Key and number together are unique in the run.
  int64_t next_use(uint64_t key) { return uses_[key]++; }
  /// Declares that this rank communicates through a GPU. Throws when another rank of this host uses the same GPU.
  void claim_gpu(const char* gpu);

  /// The area of `key`, which the first rank that asks for it allocates with `bytes` zeros. `what` names the area in the error of a
  /// full /dev/shm.
  Mapping area(uint64_t key, int64_t bytes, const std::string& what);

 private:
  /// State of a rank that watch() keeps between calls.
  struct WatchState {
    int64_t heartbeat = -1;
    int64_t silence = 0;  // nanoseconds without a heartbeat
  };
  void make_file(int32_t ranks, const int32_t* host_of_rank, int32_t own_host, int64_t timeout_ms);
  void list_local_ranks();
  const RankLocation& location_of(int32_t rank) const;
  void add_to_board(std::atomic<int64_t>& count, const std::function<void(int64_t)>& write);
  void heartbeat_loop();
  mimo_call_record* record(int64_t number) const;
  void watch_supervisor(int64_t elapsed);
  void watch_rank(int32_t rank, WatchState& watched, int64_t elapsed, int64_t now);
  void watch_progress(int64_t now);
  void watch_joining(int64_t now);
  void fail_unless_supervised(int32_t rank, const std::string& sentence);
  bool supervisor_is_alive() const;
  void print_diagnosis();
  int64_t failed_rank_heartbeat() const;
  void kill_failed_rank(int64_t heartbeat) const;
  void lock_areas();
  void write_recording() const;
  void record_now(int32_t rank, Recording& about) const;

  int file_ = -1;
  Mapping mapping_;
  FileParts parts_;
  RunHeader* header_ = nullptr;
  int32_t rank_ = -1;
  std::vector<int32_t> local_;
  std::vector<WatchState> watched_;  // of this host's ranks
  int64_t last_watch_ = 0;
  int64_t supervisor_polls_seen_ = 0;          // at the last call of watch()
  std::atomic<int64_t> supervisor_silent_{0};  // nanoseconds without a poll of the launcher
  std::atomic<int32_t> exit_code_{0};
  std::atomic<int32_t> diagnosis_file_{2};  // default: standard error
  std::once_flag concluded_;
  std::mutex stop_mutex_;
  std::condition_variable stop_condition_;
  bool stop_ = false;
  std::atomic<int> recording_{-1};  // descriptor; -1: not recording
  std::string recording_path_;
  std::thread heartbeat_thread_;
  std::map<uint64_t, int64_t> uses_;
  std::unique_ptr<Relay> relay_;
};

/// Number of ranks of the run that a recording is of.
int32_t recorded_ranks(const std::string& path);
/// Reads recordings of a run's ranks into `run`, a new run of as many ranks, and fails it for the recorded or inferred reason.
void read_recordings(const std::vector<std::string>& paths, Run& run);

/// The diagnosis of a failed run: a sentence with the reason, and a line for every other rank.
std::string diagnosis_of(const Run& run);

}  // namespace mimo

struct mimo_run {
  template <class... Args>
  explicit mimo_run(Args&&... args) : run(std::forward<Args>(args)...) {}
  mimo::Run run;
};
