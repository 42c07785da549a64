// What the ranks of one host share: one unnamed file in /dev/shm, mapped by every rank and by the launcher. It holds a
// header (has the run failed, why), a region for each rank (alive? where? its latest collective calls) and, behind them,
// areas that groups allocate. Nobody has to clean up: the file is gone with the last process that has it open.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
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

/// Wakes the threads of one rank that wait for others. Ringing costs a system call only when somebody sleeps.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings;
  std::atomic<int32_t> sleepers;

  void ring();
  /// Sleeps until `rings` differs from `seen`, at most `milliseconds`. The caller has raised `sleepers` before it read
  /// `seen`, and looked once more for what it waits for after that: no ring is lost.
  void sleep(uint32_t seen, int64_t milliseconds);
};

constexpr int64_t flight_records = 64;

/// One rank's part of the file, written by that rank unless it says otherwise.
struct RankRegion {
  alignas(64) std::atomic<int32_t> phase;
  std::atomic<int32_t> pid;  // by the launcher before the rank joins
  std::atomic<int64_t> heartbeat;
  std::atomic<int64_t> progress;
  std::atomic<int64_t> progress_time;
  std::atomic<int64_t> step;
  std::atomic<int64_t> calls;
  std::atomic<int64_t> waiting_call;
  char host[64];
  char module[32];
  char coordinates[64];
  char error[512];
  mimo_call_record flight[flight_records];  // call c is in flight[c % flight_records]
};

/// What a rank leaves on disk of itself.
struct Recording {
  char magic[8];
  int64_t layout;
  int32_t ranks;
  int32_t rank;
  int64_t written;  // CLOCK_REALTIME, nanoseconds
  int32_t failed;
  int32_t failed_rank;
  char reason[512];
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

struct RunHeader {
  char magic[8];
  int64_t layout;
  int32_t ranks;
  int32_t supervised;
  int64_t timeout_ms;
  int64_t created;
  std::atomic<int32_t> claimed;        // the diagnosis has its printer
  std::atomic<int32_t> deciding;       // somebody has declared the failure; `failed` follows
  std::atomic<int32_t> failed;         // rank and reason are valid
  std::atomic<int64_t> failed_time;
  int32_t failed_rank;
  char reason[512];
  std::atomic<int32_t> lock;  // of the areas
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

  void join(int32_t rank);
  void leave();

  /// How the groups that this process makes move tensors between GPUs.
  int32_t backend = MIMO_BACKEND_NCCL;

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
  /// Whether a rank has begun a collective of tensors of this group with this sequence number or a later one.
  bool has_begun(int32_t rank, const std::string& group, int64_t sequence) const;
  /// One look at every rank. Fails the run when one is dead, stopped, silent or without progress.
  void watch();

  /// The heart writes a recording of this rank to `path` from now on.
  void record_to(const std::string& path);
  /// Takes over what a recording holds of a rank.
  void take(int32_t rank, const RankRegion& recorded);

  /// The area of `key`, made with `bytes` zeros by whoever asks first. `what` names it in the error of a full /dev/shm.
  Mapping area(uint64_t key, int64_t bytes, const std::string& what);

 private:
  /// What watch() remembers of a rank between looks.
  struct Watched {
    int64_t heartbeat = -1;
    int64_t silent = 0;  // nanoseconds
  };
  void map_file();
  void beat();
  mimo_call_record* record(int64_t number) const;
  void watch_rank(int32_t rank, int64_t elapsed, int64_t now);
  void watch_progress(int64_t now);
  void lock_areas();
  void write_recording() const;

  int file_ = -1;
  Mapping mapping_;
  RunHeader* header_ = nullptr;
  int32_t rank_ = -1;
  std::vector<Watched> watched_;
  int64_t last_watch_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<int> recording_{-1};  // file
  std::string recording_path_;
  std::thread heart_;
};

}  // namespace mimo

struct mimo_run {
  template <class... Args>
  explicit mimo_run(Args&&... args) : run(std::forward<Args>(args)...) {}
  mimo::Run run;
};
