// Layout of the memory that the ranks of one host share, in this order: RunHeader; a RankLocation for every rank of the run; a
// RankRegion for each known rank, that is each rank of this host, of hosts below it and of host 0; the FlightRecorder of each rank
// of this host; the RemoteCalls of each other known rank; the board; and the BegunRanges of the whole run after a failure. A rank
// of the run takes 8 bytes, a known rank about 2 KB more, a rank of this host 18 KB more.
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
/// Terminates a string that was received or read from a file.
template <size_t size>
void end_inside(char (&text)[size]) {
  text[size - 1] = 0;
}

/// Wakes the threads of a rank that wait for others. Ringing costs a system call only when a thread sleeps.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings;
  std::atomic<int32_t> sleepers;

  void ring();
  /// Sleeps until `rings` differs from `seen`, at most `milliseconds`. Before this call the caller increments `sleepers`, reads
  /// `seen`, and checks its condition once more, so that no ring is lost.
  void sleep(uint32_t seen, int64_t milliseconds);
};

constexpr int64_t flight_records = 64;
/// Nanoseconds without a heartbeat after which a rank has failed. Together with the time to end the others less than 10 s.
constexpr int64_t longest_silence = 5'000'000'000;
constexpr int32_t max_ranks = 65536;

struct RankLocation {
  int32_t host;    // index of its host
  int32_t region;  // index of its region in this host's file; -1: not a known rank
};

/// State of a rank. The rank itself writes it, except where noted; that of a rank on another host is a copy by the relay.
struct RankRegion {
  alignas(64) std::atomic<int32_t> phase;
  std::atomic<int32_t> pid;                 // written by the launcher before the rank joins
  std::atomic<int64_t> process_start_time;  // of that process (process_status.h); 0: not known
  std::atomic<int64_t> heartbeat;
  std::atomic<int64_t> progress;
  std::atomic<int64_t> progress_time;
  std::atomic<int64_t> step;
  std::atomic<int64_t> calls;
  std::atomic<int64_t> waiting_call;
  std::atomic<int32_t> state_received;  // of a rank on another host: its state after the failure has arrived
  char gpu[20];                         // PCI bus id of its GPU, once the rank communicates through it
  char host[MIMO_HOST_BYTES];
  char module[MIMO_MODULE_BYTES];
  char coordinates[MIMO_COORDINATES_BYTES];
  char error[MIMO_SENTENCE_BYTES];
};

/// The latest collective that a rank has begun in a group.
struct LatestBegun {
  std::atomic<uint64_t> group;       // hash of its name; 0: free entry
  std::atomic<int64_t> sequence[2];  // of tensors, and of host values, which are counted apart
};
/// Groups with members on other hosts that a rank's flight recorder has room for.
constexpr int32_t max_cross_host_groups = 32;

struct FlightRecorder {
  mimo_call_record calls[flight_records];  // call c is in calls[c % flight_records]
  LatestBegun begun[max_cross_host_groups];
};

/// Calls of a rank that are sent to other hosts after a failure: the call it waits for, unfinished calls, and the latest call.
constexpr int32_t reported_calls = 4;
struct RemoteCalls {
  mimo_call_record calls[reported_calls];  // newest first; an entry without a group's name is free
};

/// When the run failed, ranks `first` to `last` had begun collective `sequence` of the group of this name.
struct BegunRange {
  uint64_t group;  // hash of its name
  int64_t sequence;
  int32_t values;  // 1: a collective of host values
  int32_t first, last;
};

/// Progress of a set of ranks: of a host, of the hosts below it in the tree (relay.h), or of the run.
struct ProgressSummary {
  int32_t joined, finished;  // numbers of ranks; finished ranks count as joined too
  int32_t absent;            // the first rank that has not joined; -1: all have
  int32_t busy;              // the first running rank that waits for no collective; -1: all wait or have ended
  int64_t progress_age;      // nanoseconds since the latest progress of a running rank; -1: no rank runs
  int64_t step;              // the last step that every rank has finished
};

/// A ProgressSummary in shared memory.
struct SharedProgress {
  std::atomic<int32_t> joined, finished, absent, busy;
  std::atomic<int64_t> progress_time;  // by this host's clock; -1: no rank runs
  std::atomic<int64_t> step;
};

/// An area of the file, shared by the members of a group.
struct AreaEntry {
  uint64_t key;  // hash of the group's name and members
  int64_t offset;
  int64_t bytes;
};

constexpr int64_t max_areas = 4096;

/// Hosts whose ranks read a posting.
enum class PostingScope : int32_t {
  host,  // the host of the rank that posts
  run,   // other hosts too
};

/// An entry of the board: a key with a value for other ranks, such as the identifier of an NCCL communicator.
struct Posting {
  uint64_t key;
  PostingScope scope;
  int32_t remote;  // 1: posted on another host
  char value[256];
};

/// Key-value store of this host's ranks, to which entries are only added. It holds what these ranks post and the postings of
/// other hosts that they request.
struct Board {
  std::atomic<int64_t> postings;  // number so far
  std::atomic<int64_t> requests;  // number of keys so far that a rank waits for and that may come from another host
};

/// Most postings of a host, and most requests: a group and a pair of ranks makes an entry each, and an encoder's rank may have
/// hundreds of pairs.
constexpr int64_t board_capacity(int32_t local_ranks) { return 1024 + 64 * static_cast<int64_t>(local_ranks); }
/// Most BegunRanges of a run; further ranges are dropped. Neighbouring ranks usually begin the same collectives, so ranges are few.
constexpr int64_t begun_capacity(int32_t ranks) { return 1024 + static_cast<int64_t>(ranks); }

struct RunHeader {
  char magic[8];
  int64_t layout;
  int32_t ranks;
  int32_t local_ranks;  // ranks of this host, which have the first regions
  int32_t known_ranks;  // ranks with a region
  int32_t supervised;
  int64_t timeout_ms;
  int64_t created;
  int32_t from_recordings;                // 1: read from recordings, which some ranks may lack
  std::atomic<int64_t> supervisor_polls;  // calls of supervise() by the launcher
  std::atomic<int32_t> diagnosis_state;   // 0, or claimed or printed (run_conclude.cpp)
  std::atomic<int32_t> failure_claimed;   // 1: a process is writing the failure; `failed` follows
  std::atomic<int32_t> failed;            // 1: failed_rank and reason are valid
  std::atomic<int64_t> failed_time;
  int32_t failed_rank;  // -1: no rank is to blame
  int32_t failed_by;    // the rank that declared the failure; -1: no rank
  char reason[MIMO_SENTENCE_BYTES];
  int32_t hosts;
  int32_t own_host;
  SharedProgress progress_below;     // of the hosts below this one
  SharedProgress progress_of_run;    // of all hosts, as last received from the root
  std::atomic<int64_t> begun_count;  // number of BegunRanges
  std::atomic<int32_t> begun_known;  // 1: after a failure, the BegunRanges are valid
  std::atomic<int32_t> settled;      // 1: after a failure, the relays have exchanged all states or given up
  std::atomic<int32_t> root_lost;    // 1: the connection to host 0 is lost
  std::atomic<int32_t> lock;         // of the areas and the board
  int64_t file_bytes;
  int64_t area_count;
  AreaEntry areas[max_areas];
};

/// Offsets of the parts of the file, in bytes.
struct FileParts {
  int64_t locations = 0, regions = 0, flights = 0, remote_calls = 0, board = 0, postings = 0, requests = 0, begun = 0, end = 0;

  FileParts() = default;
  explicit FileParts(const RunHeader& header);
};

// Hosts form a tree in the order of their indices, with host 0 as the root.
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

/// A rank's flight recording on disk.
struct Recording {
  char magic[8];
  int64_t layout;
  int32_t ranks;
  int32_t rank;
  int64_t written;  // CLOCK_REALTIME, nanoseconds
  int32_t failed;
  int32_t failed_rank;
  char reason[MIMO_SENTENCE_BYTES];
  /// States of the rank itself and of the failed rank, which may have ended before it recorded its last calls.
  struct Recorded {
    RankRegion region;
    FlightRecorder flight;
  } own_state, failed_state;
};

}  // namespace mimo
