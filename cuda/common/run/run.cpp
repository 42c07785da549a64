// The shared file of a run: making, opening and mapping it, its areas, and how a run fails.
#include "run.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>

#include "relay.h"
#include "status.h"

namespace mimo {
namespace {

constexpr char folder[] = "/dev/shm";
constexpr char magic[8] = {'m', 'i', 'm', 'o', 'r', 'u', 'n', 0};
/// Raised with every change of the structs in run.h.
constexpr int64_t layout = 3;
constexpr int64_t page = 4096;

int64_t rounded_up(int64_t bytes, int64_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

int64_t header_bytes() { return rounded_up(static_cast<int64_t>(sizeof(RunHeader)), page); }

int64_t board_offset(int32_t ranks) { return header_bytes() + ranks * static_cast<int64_t>(sizeof(RankRegion)); }

int64_t control_bytes(int32_t ranks) {
  const int64_t postings = board_capacity(ranks) * static_cast<int64_t>(sizeof(Posting));
  return rounded_up(board_offset(ranks) + static_cast<int64_t>(sizeof(Board)) + postings, page);
}

std::string system_error(const std::string& what) { return what + ": " + std::strerror(errno) + "."; }

/// A file without a name: it disappears when its last user ends, however that happens.
int open_unnamed() {
  int file = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  // A file system without such files: a name for the moment of opening.
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

/// Extends the file by real memory now: a page that is not there later is a bus error.
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
  // Orders the caller's writes before the look at `sleepers`.
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
  // Populated: the pages exist, and faults would count as the first collectives' time.
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
  MIMO_REQUIRE(timeout_ms > 0, "mimo_run_create");
  file_ = open_unnamed();
  if (file_ < 0) {
    const int32_t status = errno == ENOMEM ? MIMO_ERROR_OUT_OF_MEMORY : MIMO_ERROR_DEVICE;
    throw Error(status, system_error(std::string("Ranks of one host need shared memory, but ") + folder +
                                     " takes no file"));
  }
  try {
    const int64_t bytes = control_bytes(ranks);
    extend(file_, 0, bytes, "the control memory of the run");
    mapping_ = Mapping(file_, 0, bytes);
  } catch (...) {
    close(file_);
    throw;
  }
  header_ = reinterpret_cast<RunHeader*>(mapping_.address());
  header_->layout = layout;
  header_->ranks = ranks;
  header_->supervised = supervised ? 1 : 0;
  header_->timeout_ms = timeout_ms;
  header_->created = monotonic_nanoseconds();
  header_->failed_rank = -1;
  header_->failed_by = -1;
  header_->hosts = 1;
  header_->file_bytes = control_bytes(ranks);
  for (int32_t rank = 0; rank < ranks; ++rank) region(rank).waiting_call = -1;
  std::memcpy(header_->magic, magic, sizeof(magic));
}

Run::Run(const std::string& path) {
  file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file_ < 0) {
    throw Error(MIMO_ERROR_PEER, system_error("The shared memory of the run (" + path + ") cannot be opened"));
  }
  struct stat about {};
  bool good = fstat(file_, &about) == 0 && about.st_size >= header_bytes();
  if (good) {
    mapping_ = Mapping(file_, 0, header_bytes());
    header_ = reinterpret_cast<RunHeader*>(mapping_.address());
    good = std::memcmp(header_->magic, magic, sizeof(magic)) == 0 && header_->layout == layout &&
           about.st_size >= control_bytes(header_->ranks);
  }
  if (!good) {
    close(file_);
    throw Error(MIMO_ERROR_PEER, path + " is not the shared memory of a run of this version.");
  }
  mapping_ = Mapping(file_, 0, control_bytes(header_->ranks));
  header_ = reinterpret_cast<RunHeader*>(mapping_.address());
}

Run::~Run() {
  // Other hosts learn of this rank's end as long as the relay beats.
  relay_.reset();
  stop_ = true;
  if (heart_.joinable()) heart_.join();
  if (file_ >= 0) close(file_);
}

std::string Run::path() const { return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file_); }

RankRegion& Run::region(int32_t rank) const {
  MIMO_REQUIRE(rank >= 0 && rank < header_->ranks, "A rank of the run");
  return reinterpret_cast<RankRegion*>(mapping_.address() + header_bytes())[rank];
}

Board& Run::board() const { return *reinterpret_cast<Board*>(mapping_.address() + board_offset(ranks())); }

int32_t Run::rank() const {
  MIMO_REQUIRE(rank_ >= 0, "A group (call mimo_run_join first)");
  return rank_;
}

bool Run::fail(int32_t rank, const std::string& sentence) {
  if (rank >= 0) {
    RankRegion& own = region(rank);
    if (own.error[0] == 0) copy_string(own.error, sizeof(own.error), sentence.c_str());
    own.phase = MIMO_RANK_PHASE_FAILED;
  }
  if (header_->deciding.exchange(1) != 0) return false;
  header_->failed_rank = rank;
  header_->failed_by = rank_;
  copy_string(header_->reason, sizeof(header_->reason), sentence.c_str());
  header_->failed_time = monotonic_nanoseconds();
  header_->failed.store(1, std::memory_order_release);
  return true;
}

void Run::require_alive() const {
  if (!failed()) return;
  // This process may end before its heart beats again.
  write_recording();
  const std::string who = header_->failed_rank < 0 ? "" : "rank " + std::to_string(header_->failed_rank) + ": ";
  throw Error(MIMO_ERROR_PEER, "The run has failed: " + who + header_->reason);
}

void Run::lock_areas() {
  while (header_->lock.exchange(1, std::memory_order_acquire) != 0) {
    require_alive();  // its holder may have died
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
  if (header_->area_count == max_areas) fail(-1, "A run has at most 4096 groups and pairs that talk.");
  require_alive();
  extend(file_, header_->file_bytes, bytes, what);
  const AreaEntry entry{key, header_->file_bytes, bytes};
  header_->areas[header_->area_count++] = entry;
  header_->file_bytes += bytes;
  return Mapping(file_, entry.offset, bytes);
}

}  // namespace mimo
