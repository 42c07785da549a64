// The structs in the memory that the ranks of one host share, in this order: RunHeader, a RankPlace for every rank of the run,
// a RankRegion for each rank that this host knows more of, the FlightRecorder of each rank of this host, the FarCalls of each
// other known rank, the board, and the collectives that ranks of other hosts had begun when the run failed. All ranks of the
// run cost a host 8 bytes each, those it knows about 2 KB, its own 18 KB.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "mimo.h"

namespace mimo {

/// Nanoseconds of the monotonic clock, the same for all processes of the host.
int64_t monotonic_nanoseconds();
constexpr int64_t millisecond = 1'000'000;

/// Copies as much of a string as `size` bytes with the zero hold.
void copy_string(char* to, size_t size, const char* from);
/// Makes a string that came from outside end inside its field.
template <size_t size>
void end_inside(char (&text)[size]) {
  text[size - 1] = 0;
}

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
constexpr int32_t max_ranks = 65536;

/// Where a rank is.
struct RankPlace {
  int32_t host;    // index of its host
  int32_t region;  // of its region in this host's file; -1: it has none here
};

/// A rank, written by that rank unless it says otherwise; of a rank on another host a copy.
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
  std::atomic<int32_t> told;  // of another host: where it was when the run had failed is known
  char gpu[20];               // the GPU's place on the bus, once the rank communicates through it
  char host[MIMO_HOST_BYTES];
  char module[MIMO_MODULE_BYTES];
  char coordinates[MIMO_COORDINATES_BYTES];
  char error[MIMO_SENTENCE_BYTES];
};

/// The latest collective of a rank in its group of one name: of tensors, and of host values, which are counted apart.
struct LatestBegun {
  std::atomic<uint64_t> group;  // hash of the name; 0: free
  std::atomic<int64_t> sequence[2];
};
/// Groups of a rank with members on other hosts.
constexpr int32_t most_wide_groups = 32;

struct FlightRecorder {
  mimo_call_record calls[flight_records];  // call c is in calls[c % flight_records]
  LatestBegun begun[most_wide_groups];     // of groups with members on other hosts
};

/// Calls of a rank that other hosts are told of: the one it waits for, those not done, and its latest.
constexpr int32_t reported_calls = 4;
struct FarCalls {
  mimo_call_record calls[reported_calls];  // the newest first; without a group's name: free
};

/// Ranks `first` to `last` had begun the collective `sequence` of their groups of one name when the run failed.
struct BegunRange {
  uint64_t group;
  int64_t sequence;
  int32_t values;  // 1: of host values
  int32_t first, last;
};

/// Report of a host on all ranks of it and of the hosts below it in the tree (relay.h), or of the centre on all ranks.
struct ProgressSummary {
  int32_t joined, finished;  // ranks; those that have finished have joined too
  int32_t absent;            // the first that has not joined; -1: all have
  int32_t busy;              // the first rank that runs and waits for no collective; -1: all wait or have ended
  int64_t progress_age;      // nanoseconds since the latest progress of a running rank; -1: no rank runs
  int64_t step;              // the last that every rank has finished
};

/// An outlook in shared memory.
struct SharedProgress {
  std::atomic<int32_t> joined, finished, absent, busy;
  std::atomic<int64_t> progress_time;  // of this host's clock; -1: no rank runs
  std::atomic<int64_t> step;
};

/// An area of the file that the members of a group share.
struct AreaEntry {
  uint64_t key;  // of the group's name and members
  int64_t offset;
  int64_t bytes;
};

constexpr int64_t max_areas = 4096;

/// Readers of a posting.
enum class Reach : int32_t {
  host,  // all are on this host
  run,   // some are on others
};

/// An entry that a rank posted for others to read: identifiers of NCCL's communicators.
struct Posting {
  uint64_t key;
  Reach reach;
  int32_t arrived;  // it was posted on another host
  char value[256];
};

/// Postings and wishes are only added. Both are of ranks of this host; postings that these wish for arrive from other hosts.
struct Board {
  std::atomic<int64_t> count;   // of postings
  std::atomic<int64_t> wished;  // of keys that ranks wait for and that others post
};

/// Groups of ranks and pairs of neighbours; an encoder's rank may have hundreds.
constexpr int64_t board_capacity(int32_t local_ranks) { return 1024 + 64 * static_cast<int64_t>(local_ranks); }
/// Ranks begin the same collectives, so few runs describe all ranks; runs beyond this number are left out.
constexpr int64_t begun_capacity(int32_t ranks) { return 1024 + static_cast<int64_t>(ranks); }

struct RunHeader {
  char magic[8];
  int64_t layout;
  int32_t ranks;
  int32_t local_ranks;  // on this host: these have the first regions
  int32_t known_ranks;  // with regions
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
  SharedProgress below;               // of the hosts below this one
  SharedProgress whole;               // of all, as the centre has said
  std::atomic<int64_t> begun_runs;   // of ranks of other hosts
  std::atomic<int32_t> mirrored;     // since the failure: those are here
  std::atomic<int32_t> settled;      // their notes after the failure are here, or were given up
  std::atomic<int32_t> centre_lost;  // the host of rank 0 is gone
  std::atomic<int32_t> lock;         // of the areas and the board
  int64_t file_bytes;
  int64_t area_count;
  AreaEntry areas[max_areas];
};

/// Offsets of the parts of the file, in bytes.
struct FileParts {
  int64_t places = 0, regions = 0, flights = 0, far_calls = 0, board = 0, postings = 0, wishes = 0, begun = 0, end = 0;

  FileParts() = default;
  explicit FileParts(const RunHeader& header);
};

/// Hosts form a tree in the order of their indices, whose root, host 0, is the centre.
constexpr int32_t parent_of(int32_t host) { return (host - 1) / MIMO_HOST_FAN_OUT; }
/// Whether `host` is `ancestor` or below it.
constexpr bool is_below(int32_t host, int32_t ancestor) {
  while (host > ancestor) host = parent_of(host);
  return host == ancestor;
}
constexpr int32_t depth_of(int32_t host) {
  int32_t depth = 0;
  for (; host > 0; host = parent_of(host)) ++depth;
  return depth;
}
constexpr int32_t children_of(int32_t host, int32_t hosts) {
  const int64_t first = static_cast<int64_t>(host) * MIMO_HOST_FAN_OUT + 1;
  const int64_t left = hosts - first;
  return left <= 0 ? 0 : static_cast<int32_t>(left < MIMO_HOST_FAN_OUT ? left : MIMO_HOST_FAN_OUT);
}

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
  /// Of the rank, and of the failed rank, which may have ended before it recorded its last calls.
  struct Recorded {
    RankRegion region;
    FlightRecorder flight;
  } own, blamed;
};

}  // namespace mimo
