// The shared file of a run: making, opening and mapping it, its areas, and how a run fails.
#include "run.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

#include "relay.h"
#include "status.h"

namespace mimo {
namespace {

constexpr char folder[] = "/dev/shm";
constexpr char magic[8] = {'m', 'i', 'm', 'o', 'r', 'u', 'n', 0};
/// Incremented with every change of the structs in run_layout.h.
constexpr int64_t layout = 4;
constexpr int64_t page = 4096;

int64_t rounded_up(int64_t bytes, int64_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

std::string system_error(const std::string& what) { return what + ": " + std::strerror(errno) + "."; }

/// A file without a name, which the system deletes with the last process that has it open, however that process ends.
int open_unnamed() {
  int file = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  // On a file system without O_TMPFILE the file has a name until it is open.
  const std::string name =
      std::string(folder) + "/mimo-run-" + std::to_string(getpid()) + "-" + std::to_string(monotonic_nanoseconds());
  file = open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0) unlink(name.c_str());
  return file;
}

/// "12.3 MB"
std::string megabytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

/// Extends the file and allocates its pages: a page that cannot be allocated on first use would be a bus error.
void extend(int file, int64_t from, int64_t bytes, const std::string& what) {
  int status;
  do status = posix_fallocate(file, from, bytes);
  while (status == EINTR);
  if (status == 0) return;
  if (status != ENOSPC && status != ENOMEM && status != EFBIG) {
    errno = status;
    throw Error(MIMO_ERROR_DEVICE, system_error(std::string(folder) + " gives no memory for " + what));
  }
  struct statvfs space {};
  statvfs(folder, &space);
  const int64_t left = static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize);
  const int64_t all = static_cast<int64_t>(space.f_blocks) * static_cast<int64_t>(space.f_frsize);
  throw Error(MIMO_ERROR_DEVICE, std::string(folder) + " is full: " + what + " needs " + megabytes(bytes) + ", " +
                                     megabytes(left) + " of " + megabytes(all) +
                                     " are free. Free some, or enlarge it (docker run --shm-size).");
}

}  // namespace

FileParts::FileParts(const RunHeader& header) {
  const int64_t local = header.local_ranks, known = header.known_ranks;
  int64_t at = 0;
  const auto next = [&at](int64_t bytes) { return std::exchange(at, rounded_up(at + bytes, 64)); };
  next(sizeof(RunHeader));
  locations = next(header.ranks * static_cast<int64_t>(sizeof(RankLocation)));
  regions = next(known * static_cast<int64_t>(sizeof(RankRegion)));
  flights = next(local * static_cast<int64_t>(sizeof(FlightRecorder)));
  remote_calls = next((known - local) * static_cast<int64_t>(sizeof(RemoteCalls)));
  board = next(sizeof(Board));
  postings = next(board_capacity(header.local_ranks) * static_cast<int64_t>(sizeof(Posting)));
  requests = next(board_capacity(header.local_ranks) * static_cast<int64_t>(sizeof(uint64_t)));
  begun = next(header.hosts > 1 ? begun_capacity(header.ranks) * static_cast<int64_t>(sizeof(BegunRange)) : 0);
  end = rounded_up(at, page);
}

int64_t monotonic_nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void copy_string(char* to, size_t size, const char* from) {
  const size_t length = strnlen(from, size - 1);
  std::memcpy(to, from, length);
  to[length] = 0;
}

void Doorbell::ring() {
  // Orders the caller's writes before the load of `sleepers`.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_relaxed) == 0) return;
  rings.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Doorbell::sleep(uint32_t seen, int64_t milliseconds) {
  const timespec limit{milliseconds / 1000, milliseconds % 1000 * 1'000'000};
  syscall(SYS_futex, &rings, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

Mapping::Mapping(int file, int64_t offset, int64_t bytes) : bytes_(bytes) {
  // MAP_POPULATE: page faults would count as time of the first collectives.
  address_ = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, offset);
  if (address_ == MAP_FAILED) {
    address_ = nullptr;
    throw Error(MIMO_ERROR_DEVICE, system_error("The shared memory of the run cannot be mapped"));
  }
}

Mapping::~Mapping() {
  if (address_ != nullptr) munmap(address_, static_cast<size_t>(bytes_));
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(address_, other.address_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Run::Run(int32_t ranks, bool supervised, int64_t timeout_ms) {
  MIMO_REQUIRE(ranks >= 1 && ranks <= max_ranks, "mimo_run_create");
  make_file(ranks, std::vector<int32_t>(static_cast<size_t>(ranks), 0).data(), 0, timeout_ms);
  header_->supervised = supervised ? 1 : 0;
}

Run::Run(int32_t ranks, const int32_t* host_of_rank, int32_t own_host, int64_t timeout_ms) {
  MIMO_REQUIRE(ranks >= 1 && ranks <= max_ranks, "mimo_run_create_part");
  make_file(ranks, host_of_rank, own_host, timeout_ms);
}

void Run::make_file(int32_t ranks, const int32_t* host_of_rank, int32_t own_host, int64_t timeout_ms) {
  MIMO_REQUIRE(timeout_ms > 0, "mimo_run_create");
  auto plan = std::make_unique<RunHeader>();
  plan->ranks = ranks;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    const int32_t host = host_of_rank[rank];
    MIMO_REQUIRE(host >= 0 && (rank > 0 || host == 0), "mimo_run_create_part");
    plan->hosts = std::max(plan->hosts, host + 1);
    if (host == own_host) ++plan->local_ranks;
    if (host == 0 || is_below(host, own_host)) ++plan->known_ranks;
  }
  MIMO_REQUIRE(plan->local_ranks > 0, "mimo_run_create_part");
  parts_ = FileParts(*plan);
  file_ = open_unnamed();
  if (file_ < 0) {
    const int32_t status = errno == ENOMEM ? MIMO_ERROR_OUT_OF_MEMORY : MIMO_ERROR_DEVICE;
    throw Error(status, system_error(std::string("Ranks of one host need shared memory, but ") + folder +
                                     " takes no file"));
  }
  try {
    extend(file_, 0, parts_.end, "the control memory of the run");
    mapping_ = Mapping(file_, 0, parts_.end);
  } catch (...) {
    close(file_);
    throw;
  }
  header_ = reinterpret_cast<RunHeader*>(mapping_.address());
  header_->layout = layout;
  header_->ranks = ranks;
  header_->local_ranks = plan->local_ranks;
  header_->known_ranks = plan->known_ranks;
  header_->timeout_ms = timeout_ms;
  header_->created = monotonic_nanoseconds();
  header_->failed_rank = -1;
  header_->failed_by = -1;
  header_->hosts = plan->hosts;
  header_->own_host = own_host;
  for (SharedProgress* progress : {&header_->progress_below, &header_->progress_of_run}) {
    progress->absent = progress->busy = -1;
    progress->progress_time = -1;
  }
  header_->file_bytes = parts_.end;
  auto* locations = reinterpret_cast<RankLocation*>(mapping_.address() + parts_.locations);
  int32_t local = 0, far = plan->local_ranks;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    const int32_t host = host_of_rank[rank];
    const bool known = host == 0 || is_below(host, own_host);
    locations[rank] = {host, host == own_host ? local++ : known ? far++ : -1};
    if (known) region(rank).waiting_call = -1;
  }
  list_local_ranks();
  std::memcpy(header_->magic, magic, sizeof(magic));
}

Run::Run(const std::string& path) {
  file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file_ < 0) {
    throw Error(MIMO_ERROR_PEER, system_error("The shared memory of the run (" + path + ") cannot be opened"));
  }
  struct stat about {};
  int64_t bytes = 0;
  if (fstat(file_, &about) == 0 && about.st_size >= static_cast<int64_t>(sizeof(RunHeader))) {
    const Mapping beginning(file_, 0, static_cast<int64_t>(sizeof(RunHeader)));
    const auto& header = *reinterpret_cast<const RunHeader*>(beginning.address());
    if (std::memcmp(header.magic, magic, sizeof(magic)) == 0 && header.layout == layout) {
      parts_ = FileParts(header);
      bytes = parts_.end;
    }
  }
  if (bytes == 0 || about.st_size < bytes) {
    close(file_);
    throw Error(MIMO_ERROR_PEER, path + " is not the shared memory of a run of this version.");
  }
  mapping_ = Mapping(file_, 0, bytes);
  header_ = reinterpret_cast<RunHeader*>(mapping_.address());
  list_local_ranks();
}

void Run::list_local_ranks() {
  for (int32_t rank = 0; rank < ranks(); ++rank) {
    if (is_local(rank)) local_.push_back(rank);
  }
}

Run::~Run() {
  // The relay still has to tell other hosts that this rank has ended.
  relay_.reset();
  {
    std::lock_guard<std::mutex> lock(stop_mutex_);
    stop_ = true;
  }
  stop_condition_.notify_all();
  if (heartbeat_thread_.joinable()) heartbeat_thread_.join();
  if (file_ >= 0) close(file_);
}

std::string Run::path() const { return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file_); }

const RankLocation& Run::location_of(int32_t rank) const {
  MIMO_REQUIRE(rank >= 0 && rank < header_->ranks, "A rank of the run");
  return reinterpret_cast<RankLocation*>(mapping_.address() + parts_.locations)[rank];
}

RankRegion& Run::region(int32_t rank) const {
  MIMO_REQUIRE(knows(rank), "A rank that this host knows");
  return reinterpret_cast<RankRegion*>(mapping_.address() + parts_.regions)[location_of(rank).region];
}

FlightRecorder& Run::flight(int32_t local_rank) const {
  MIMO_REQUIRE(is_local(local_rank), "A rank of this host");
  return reinterpret_cast<FlightRecorder*>(mapping_.address() + parts_.flights)[location_of(local_rank).region];
}

RemoteCalls& Run::remote_calls(int32_t known_rank) const {
  MIMO_REQUIRE(knows(known_rank) && !is_local(known_rank), "A rank of another host");
  const int32_t index = location_of(known_rank).region - header_->local_ranks;
  return reinterpret_cast<RemoteCalls*>(mapping_.address() + parts_.remote_calls)[index];
}

Board& Run::board() const { return *reinterpret_cast<Board*>(mapping_.address() + parts_.board); }

Posting& Run::posting(int64_t index) const {
  return reinterpret_cast<Posting*>(mapping_.address() + parts_.postings)[index];
}

uint64_t& Run::requested_key(int64_t index) const {
  return reinterpret_cast<uint64_t*>(mapping_.address() + parts_.requests)[index];
}

BegunRange* Run::begun_ranges() const {
  return reinterpret_cast<BegunRange*>(mapping_.address() + parts_.begun);
}

int32_t Run::rank() const {
  MIMO_REQUIRE(rank_ >= 0, "A group (call mimo_run_join first)");
  return rank_;
}

bool Run::fail(int32_t rank, const std::string& sentence) {
  if (rank >= 0 && knows(rank)) {
    RankRegion& own = region(rank);
    if (own.error[0] == 0) copy_string(own.error, sizeof(own.error), sentence.c_str());
    own.phase = MIMO_RANK_PHASE_FAILED;
  }
  if (header_->failure_claimed.exchange(1) != 0) return false;
  header_->failed_rank = rank;
  header_->failed_by = rank_;
  copy_string(header_->reason, sizeof(header_->reason), sentence.c_str());
  header_->failed_time = monotonic_nanoseconds();
  header_->failed.store(1, std::memory_order_release);
  return true;
}

void Run::require_alive() const {
  if (!failed()) return;
  // This process may end before its heartbeat thread writes the next recording.
  write_recording();
  const std::string who = header_->failed_rank < 0 ? "" : "rank " + std::to_string(header_->failed_rank) + ": ";
  throw Error(MIMO_ERROR_PEER, "The run has failed: " + who + header_->reason);
}

void Run::lock_areas() {
  while (header_->lock.exchange(1, std::memory_order_acquire) != 0) {
    require_alive();  // the process that holds the lock may have died
    usleep(50);
  }
}

Mapping Run::area(uint64_t key, int64_t bytes, const std::string& what) {
  lock_areas();
  struct Unlock {
    std::atomic<int32_t>& lock;
    ~Unlock() { lock.store(0, std::memory_order_release); }
  } unlock{header_->lock};
  bytes = rounded_up(bytes, page);
  for (int64_t i = 0; i < header_->area_count; ++i) {
    const AreaEntry& entry = header_->areas[i];
    if (entry.key == key) {
      if (entry.bytes != bytes) throw Error(MIMO_ERROR_PEER, "The ranks disagree about the members of " + what + ".");
      return Mapping(file_, entry.offset, bytes);
    }
  }
  if (header_->area_count == max_areas) fail(-1, "A run has at most 4096 groups and pairs that communicate.");
  require_alive();
  extend(file_, header_->file_bytes, bytes, what);
  const AreaEntry entry{key, header_->file_bytes, bytes};
  header_->areas[header_->area_count++] = entry;
  header_->file_bytes += bytes;
  return Mapping(file_, entry.offset, bytes);
}

}  // namespace mimo
