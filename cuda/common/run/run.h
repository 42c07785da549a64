// The memory that the ranks of one host share: one unnamed file in /dev/shm, mapped by every rank and by the launcher.
// It holds a header (has the run failed, why), a region for each rank (alive? where? its latest collective calls), a
// board on which ranks post what others need to meet them, and, behind these, areas that groups allocate. No cleaning
// up is needed: the file is gone with the last process that has it open.
//
// A run of several hosts has such a file on each of them, with regions for all ranks: those of other hosts are copies,
// which the hosts' relays keep (relay.h). A process that looks at a rank, at a failure or at the board therefore looks
// into its own host's file.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "mimo.h"
#include "mimo_backend.h"

namespace mimo {

class Run;

/// Nanoseconds of the monotonic clock, the same for all processes of the host.
int64_t monotonic_nanoseconds();

/// Copies as much of a string as `size` bytes with the zero hold.
void copy_string(char* to, size_t size, const char* from);

/// Wakes the threads of one rank that wait for others. Ringing costs a system call only when a thread sleeps.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings;
  std::atomic<int32_t> sleepers;

  void ring();
  /// Sleeps until `rings` differs from `seen`, at most `milliseconds`. The caller raises `sleepers`, reads `seen`, and
  /// checks its condition once more before this call, so that no ring is lost.
  void sleep(uint32_t seen, int64_t milliseconds);
};

constexpr int64_t flight_records = 64;
/// Nanoseconds. A rank silent for this long has failed: together with the time to end the others less than ten seconds.
constexpr int64_t longest_silence = 5'000'000'000;

/// One rank's part of the file, written by that rank unless it says otherwise.
struct RankRegion {
  alignas(64) std::atomic<int32_t> phase;
  std::atomic<int32_t> pid;  // by the launcher before the rank joins
  std::atomic<int64_t> started;  // of that process (process_look.h); 0: not known
  std::atomic<int64_t> heartbeat;
  std::atomic<int64_t> progress;
  std::atomic<int64_t> progress_time;
  std::atomic<int64_t> step;
  std::atomic<int64_t> calls;
  std::atomic<int64_t> waiting_call;
  int32_t host_index;  // on which of the run's hosts the rank is
  char gpu[20];        // the GPU's place on the bus, once the rank communicates through it
  char host[MIMO_HOST_BYTES];
  char module[MIMO_MODULE_BYTES];
  char coordinates[MIMO_COORDINATES_BYTES];
  char error[MIMO_SENTENCE_BYTES];
  mimo_call_record flight[flight_records];  // call c is in flight[c % flight_records]
};

/// A rank's recording of itself on disk.
struct Recording {
  char magic[8];
  int64_t layout;
  int32_t ranks;
  int32_t rank;
  int64_t written;  // CLOCK_REALTIME, nanoseconds
  int32_t failed;
  int32_t failed_rank;
  char reason[MIMO_SENTENCE_BYTES];
  RankRegion region;
  RankRegion blamed;  // of the failed rank, which may have ended before it recorded its last calls
};

/// Ranks of the run that a recording is of.
int32_t recorded_ranks(const std::string& path);
/// Reads recordings of a run's ranks into `run`, made for them, and says why it has failed.
void read_recordings(const std::vector<std::string>& paths, Run& run);

/// An area of the file that the members of a group share.
struct AreaEntry {
  uint64_t key;  // of the group's name and members
  int64_t offset;
  int64_t bytes;
};

constexpr int64_t max_areas = 4096;
constexpr int32_t max_ranks = 1024;

/// An entry that a rank posted for others to read: identifiers of NCCL's communicators.
struct Posting {
  uint64_t key;
  int32_t host_index;  // where it was posted
  char value[256];
};

/// Postings are only added.
struct Board {
  std::atomic<int64_t> count;
  Posting postings[1];  // as many as board_capacity says
};

/// A group and two pairs of neighbours for every rank, many times over.
constexpr int64_t board_capacity(int32_t ranks) { return 256 + 16 * static_cast<int64_t>(ranks); }

struct RunHeader {
  char magic[8];
  int64_t layout;
  int32_t ranks;
  int32_t supervised;
  int64_t timeout_ms;
  int64_t created;
  int32_t recorded;                    // made of recordings: ranks without a recording are unknown
  std::atomic<int64_t> looks;          // of the launcher
  std::atomic<int32_t> claimed;        // the diagnosis has its printer, has been printed
  std::atomic<int32_t> deciding;       // a rank is declaring the failure; `failed` follows
  std::atomic<int32_t> failed;         // rank and reason are valid
  std::atomic<int64_t> failed_time;
  int32_t failed_rank;
  int32_t failed_by;                   // the rank that said so; -1: no rank
  char reason[MIMO_SENTENCE_BYTES];
  int32_t hosts;
  int32_t own_host;
  std::atomic<int32_t> mirrored;     // since the failure: the calls that the other hosts' ranks had begun are here
  std::atomic<int32_t> settled;      // their notes after the failure are here, or were given up
  std::atomic<int32_t> centre_lost;  // the host of rank 0 is gone
  std::atomic<int32_t> lock;         // of the areas and the board
  int64_t file_bytes;
  int64_t area_count;
  AreaEntry areas[max_areas];
};

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
  /// Makes the file.
  Run(int32_t ranks, bool supervised, int64_t timeout_ms);
  /// Opens the file that another process made.
  explicit Run(const std::string& path);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// Where other processes of this host open the file.
  std::string path() const;
  RunHeader& header() const { return *header_; }
  RankRegion& region(int32_t rank) const;
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
  void print_to(int32_t file) { errors_ = file; }
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
  /// Whether a rank has begun a collective of this group with this sequence number or a later one: of tensors, or of host
  /// values, which are counted apart.
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
  void take(int32_t rank, const RankRegion& recorded);

  // Several hosts.
  /// `host_of_rank` [ranks]. Called by the process that made the file, before others open it.
  void place(const int32_t* host_of_rank, int32_t own_host);
  bool spans_hosts() const { return header_->hosts > 1; }
  bool is_local(int32_t rank) const { return region(rank).host_index == header_->own_host; }
  /// This process passes on between its host and the others from now on.
  void relay_through(std::unique_ptr<Relay> relay);
  /// After a failure: whether the calls that the other hosts' ranks had begun are known here.
  bool mirrored() const { return !spans_hosts() || header_->mirrored != 0; }
  /// Waits for that, as long as the relays do.
  void await_mirrored() const;
  /// After a failure: returns when the hosts have told each other where their ranks were, or do not within some seconds.
  void settle() const;
  /// Whether diagnoses are printed here: on the host of rank 0, or on the next one when that is gone.
  bool may_diagnose() const;

  /// Shows `bytes` (at most 256) to all ranks under `key`, which must not have been used before.
  void post(uint64_t key, const void* value, int64_t bytes);
  /// Waits for them. Throws when the run fails.
  void read_posted(uint64_t key, void* value, int64_t bytes) const;
  /// A posting of another host arrives.
  void take_posting(const Posting& posting);
  Board& board() const;
  /// How often this process has made something of this key: together they name it once and for all.
  int64_t count_of(uint64_t key) { return counts_[key]++; }
  /// This rank communicates through a GPU. Throws when another rank of this host does too.
  void claim_gpu(const char* gpu);

  /// The area of `key`, made with `bytes` zeros by the first rank that asks. `what` names it in the error of a full
  /// /dev/shm.
  Mapping area(uint64_t key, int64_t bytes, const std::string& what);

 private:
  /// A rank's state that watch() remembers between looks.
  struct Watched {
    int64_t heartbeat = -1;
    int64_t silent = 0;  // nanoseconds
  };
  void map_file();
  void beat();
  mimo_call_record* record(int64_t number) const;
  void watch_supervisor(int64_t elapsed);
  void watch_rank(int32_t rank, int64_t elapsed, int64_t now);
  void watch_progress(int64_t now);
  void judge(int32_t rank, const std::string& sentence);
  bool supervisor_answers() const;
  void print_diagnosis();
  int64_t blamed_beats() const;
  void end_blamed(int64_t beats) const;
  void lock_areas();
  void write_recording() const;
  void record_now(int32_t rank, Recording& about) const;

  int file_ = -1;
  Mapping mapping_;
  RunHeader* header_ = nullptr;
  int32_t rank_ = -1;
  std::vector<Watched> watched_;
  int64_t last_watch_ = 0;
  int64_t looks_ = 0;                            // the launcher's, when this rank looked last
  std::atomic<int64_t> supervisor_silent_{0};    // nanoseconds
  std::atomic<int32_t> exit_code_{0};
  std::atomic<int32_t> errors_{2};  // standard error
  std::once_flag concluded_;
  std::atomic<bool> stop_{false};
  std::atomic<int> recording_{-1};  // file
  std::string recording_path_;
  std::thread heart_;
  std::map<uint64_t, int64_t> counts_;
  std::unique_ptr<Relay> relay_;
};

/// Why a run has failed: a sentence of its own, and a line for every other rank.
std::string diagnosis_of(const Run& run);

}  // namespace mimo

struct mimo_run {
  template <class... Args>
  explicit mimo_run(Args&&... args) : run(std::forward<Args>(args)...) {}
  mimo::Run run;
};
