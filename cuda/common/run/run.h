// The memory that the ranks of one host share: one unnamed file in /dev/shm, mapped by every rank and by the launcher.
// It holds a header (has the run failed, why), a region for each rank (alive? where? its latest collective calls), a
// board on which ranks post what others need to meet them, and, behind these, areas that groups allocate. No cleaning
// up is needed: the file is gone with the last process that has it open.
//
// A run of several hosts has such a file on each of them. Besides its own ranks' it has regions for ranks of hosts below it in
// the tree of hosts and of rank 0's host: copies, which the hosts' relays keep (relay.h). So the host of rank 0 has all. A
// process that looks at a rank, at a failure or at the board looks into its own host's file (run_layout.h).
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

/// A mapped part of the file.
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
  /// Makes the file of a run on one host.
  Run(int32_t ranks, bool supervised, int64_t timeout_ms);
  /// Makes the file of host `own_host`. `host_of_rank` [ranks]; rank 0 is on host 0.
  Run(int32_t ranks, const int32_t* host_of_rank, int32_t own_host, int64_t timeout_ms);
  /// Opens the file that another process made.
  explicit Run(const std::string& path);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// Where other processes of this host open the file.
  std::string path() const;
  RunHeader& header() const { return *header_; }
  /// Of a known rank.
  RankRegion& region(int32_t rank) const;
  /// Whether this host's file has a region for the rank: for those of this host, of hosts below it, and of rank 0's host.
  bool knows(int32_t rank) const { return location_of(rank).region >= 0; }
  /// Its recorded calls, the newest first: of a rank of this host the last `flight_records`, of others those told of.
  std::vector<const mimo_call_record*> calls_of(int32_t rank) const;
  FlightRecorder& flight(int32_t local_rank) const;
  RemoteCalls& remote_calls(int32_t known_rank) const;
  int32_t ranks() const { return header_->ranks; }
  /// This process's rank; throws before join().
  int32_t rank() const;
  bool joined() const { return rank_ >= 0; }

  /// `exit_code`: of this process when its heart has to end it because another rank has failed.
  void join(int32_t rank, int32_t exit_code);
  void leave();
  /// The launcher says which process will be a rank.
  void expect(int32_t rank, int32_t pid);
  /// The run has failed and this rank ends with `exit_code`: returns when the diagnosis has been printed, by this rank where
  /// neither a launcher nor another rank does, or when that has taken too long.
  void conclude(int32_t exit_code);
  /// Where this process prints the diagnosis if it has to.
  void print_to(int32_t file) { diagnosis_file_ = file; }
  /// Whether this process is to print the diagnosis: true for one caller.
  bool claim_diagnosis();

  /// How the groups that this process makes move tensors between GPUs.
  int32_t backend = MIMO_BACKEND_NCCL;
  mimo_device* device = nullptr;

  bool failed() const { return header_->failed.load(std::memory_order_acquire) != 0; }
  /// Declares the run failed unless it is already. Returns whether this call did.
  bool fail(int32_t rank, const std::string& sentence);
  /// Throws MIMO_ERROR_PEER with the reason when the run has failed.
  void require_alive() const;
  /// Notes a collective of this rank in its flight recorder; returns its number.
  int64_t begin_call(const std::string& group, int64_t sequence, int32_t kind, int64_t bytes);
  /// It is done: the rank has made progress.
  void end_call(int64_t number);
  /// It failed for want of these ranks.
  void fail_call(int64_t number, const std::vector<int32_t>& missing);
  /// The same, for a group with members on other hosts: these ask for it when the run has failed.
  void record_begun(const std::string& group, int64_t sequence, int32_t kind);
  /// Whether a rank has begun a collective of this group with this sequence number or a later one: of tensors, or of host
  /// values, which are counted apart. Of ranks on other hosts when knows_begun().
  bool has_begun(int32_t rank, const std::string& group, bool values, int64_t sequence) const;
  /// Looks at every rank once, and fails the run when a rank is dead, stopped, silent or without progress. In a run
  /// that a launcher watches, ranks do so only when the launcher does not look any more.
  void watch();
  /// A launcher's look.
  void supervise();

  /// The heart writes a recording of this rank to `path` from now on.
  void record_to(const std::string& path);
  /// Writes a recording of any rank to `path`, once: called by the launcher when the run has failed.
  void record_rank(int32_t rank, const std::string& path) const;
  /// Copies a rank's recording into this run.
  void take(int32_t rank, const Recording::Recorded& recorded);

  // Several hosts.
  bool spans_hosts() const { return header_->hosts > 1; }
  int32_t host_of(int32_t rank) const { return location_of(rank).host; }
  bool is_local(int32_t rank) const { return host_of(rank) == header_->own_host; }
  /// This host's ranks, ascending.
  const std::vector<int32_t>& local_ranks() const { return local_; }
  /// Of this host's ranks alone, and of all ranks of the run as far as the centre has said.
  ProgressSummary progress_of_host() const;
  ProgressSummary progress_of_run() const;
  /// This process passes on between its host and the others from now on.
  void set_relay(std::unique_ptr<Relay> relay);
  /// Messages that this process's relay has sent and received.
  void relayed(int64_t& sent, int64_t& received) const;
  /// After a failure: whether the calls that the other hosts' ranks had begun are known here.
  bool knows_begun() const { return !spans_hosts() || header_->begun_known != 0; }
  /// Waits for that, as long as the relays do.
  void await_begun() const;
  /// After a failure: returns when the hosts have told each other where their ranks were, or do not within some seconds.
  void settle() const;
  /// Whether diagnoses are printed here: on the host of rank 0, or on the next one when that is gone.
  bool may_diagnose() const;

  /// Shows `bytes` (at most 256) to ranks under `key`, which must not have been used before.
  void post(uint64_t key, const void* value, int64_t bytes, PostingScope scope);
  /// Waits for them; `scope` as of the rank that posts. Throws when the run fails.
  void await_posting(uint64_t key, void* value, int64_t bytes, PostingScope scope);
  /// A posting of another host arrives.
  void add_posting(const Posting& posting);
  Board& board() const;
  Posting& posting(int64_t index) const;
  uint64_t& requested_key(int64_t index) const;
  BegunRange* begun_ranges() const;
  /// How often this process has made something of this key: together they name it once and for all.
  int64_t next_use(uint64_t key) { return counts_[key]++; }
  /// This rank communicates through a GPU. Throws when another rank of this host does too.
  void claim_gpu(const char* gpu);

  /// The area of `key`, made with `bytes` zeros by the first rank that asks. `what` names it in the error of a full
  /// /dev/shm.
  Mapping area(uint64_t key, int64_t bytes, const std::string& what);

 private:
  /// A rank's state that watch() remembers between looks.
  struct WatchState {
    int64_t heartbeat = -1;
    int64_t silent = 0;  // nanoseconds
  };
  void make_file(int32_t ranks, const int32_t* host_of_rank, int32_t own_host, int64_t timeout_ms);
  void list_local_ranks();
  const RankLocation& location_of(int32_t rank) const;
  void add_to_board(std::atomic<int64_t>& count, const std::function<void(int64_t)>& write);
  void beat();
  mimo_call_record* record(int64_t number) const;
  void watch_supervisor(int64_t elapsed);
  void watch_rank(int32_t rank, WatchState& seen, int64_t elapsed, int64_t now);
  void watch_progress(int64_t now);
  void watch_joining(int64_t now);
  void fail_unless_supervised(int32_t rank, const std::string& sentence);
  bool supervisor_is_alive() const;
  void print_diagnosis();
  int64_t failed_rank_heartbeat() const;
  void kill_failed_rank(int64_t beats) const;
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
  int64_t supervisor_polls_seen_ = 0;                            // the launcher's, when this rank looked last
  std::atomic<int64_t> supervisor_silent_{0};    // nanoseconds
  std::atomic<int32_t> exit_code_{0};
  std::atomic<int32_t> diagnosis_file_{2};  // standard error
  std::once_flag concluded_;
  std::mutex stop_mutex_;
  std::condition_variable stop_condition_;
  bool stop_ = false;
  std::atomic<int> recording_{-1};  // file
  std::string recording_path_;
  std::thread heartbeat_thread_;
  std::map<uint64_t, int64_t> counts_;
  std::unique_ptr<Relay> relay_;
};

/// Ranks of the run that a recording is of.
int32_t recorded_ranks(const std::string& path);
/// Reads recordings of a run's ranks into `run`, made for them, and says why it has failed.
void read_recordings(const std::vector<std::string>& paths, Run& run);

/// Why a run has failed: a sentence of its own, and a line for every other rank.
std::string diagnosis_of(const Run& run);

}  // namespace mimo

struct mimo_run {
  template <class... Args>
  explicit mimo_run(Args&&... args) : run(std::forward<Args>(args)...) {}
  mimo::Run run;
};
