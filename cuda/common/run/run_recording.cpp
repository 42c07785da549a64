// Recordings on disk: each rank's heartbeat thread writes its region and flight recorder to a file at every beat, so that a
// diagnosis is possible after all processes have been killed.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <memory>

#include "run.h"
#include "status.h"

namespace mimo {
namespace {

constexpr char magic[8] = {'m', 'i', 'm', 'o', 'f', 'l', 'y', 0};
constexpr int64_t layout = 4;
constexpr double nanoseconds = 1e9;
/// Seconds. All ranks write several times in it, so a rank whose last recording is older than the newest by more stopped first.
constexpr double same_time = 1.0;

int64_t wall_clock() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void terminate_strings(Recording::Recorded& recorded) {
  end_inside(recorded.region.gpu);
  end_inside(recorded.region.host);
  end_inside(recorded.region.module);
  end_inside(recorded.region.coordinates);
  end_inside(recorded.region.error);
  for (mimo_call_record& call : recorded.flight.calls) end_inside(call.group);
}

std::unique_ptr<Recording> read_recording(const std::string& path) {
  // The struct is zeroed, and its atomics are read as plain numbers.
  auto recording = std::unique_ptr<Recording>(new (std::align_val_t(alignof(Recording))) Recording());
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const ssize_t count = file < 0 ? -1 : pread(file, static_cast<void*>(recording.get()), sizeof(Recording), 0);
  if (file >= 0) close(file);
  const bool good = count == static_cast<ssize_t>(sizeof(Recording)) &&
                    std::memcmp(recording->magic, magic, sizeof(magic)) == 0 && recording->layout == layout &&
                    recording->ranks >= 1 && recording->ranks <= max_ranks && recording->rank >= 0 &&
                    recording->rank < recording->ranks;
  if (!good) throw Error(MIMO_ERROR_DATA, path + " is no recording of a rank by this version.");
  end_inside(recording->reason);
  terminate_strings(recording->own_state);
  terminate_strings(recording->failed_state);
  return recording;
}

/// Creates a recording and returns its descriptor. The file gets its name when it is complete, because the process may end at any
/// moment.
int create_recording(const std::string& path, const Recording& about) {
  const std::string unfinished = path + ".new";
  const int file = open(unfinished.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
  const bool whole = file >= 0 && write(file, static_cast<const void*>(&about), sizeof(about)) == sizeof(about) &&
                     rename(unfinished.c_str(), path.c_str()) == 0;
  if (whole) return file;
  const std::string reason = std::strerror(errno);
  if (file >= 0) close(file);
  unlink(unfinished.c_str());
  throw Error(MIMO_ERROR_DEVICE, "The recording " + path + " cannot be written: " + reason + ".");
}

}  // namespace

void Run::record_to(const std::string& path) {
  Recording about{};
  record_now(rank(), about);
  const int file = create_recording(path, about);
  recording_path_ = path;
  recording_.store(file, std::memory_order_release);
}

void Run::record_rank(int32_t rank, const std::string& path) const {
  Recording about{};
  record_now(rank, about);
  close(create_recording(path, about));
}

void Run::write_recording() const {
  const int file = recording_.load(std::memory_order_acquire);
  if (file < 0 || region(rank_).phase == MIMO_RANK_PHASE_FINISHED) return;
  Recording about{};
  record_now(rank_, about);
  // A full disk must not fail the run.
  if (pwrite(file, static_cast<const void*>(&about), sizeof(about), 0) < 0) return;
}

/// Fills a recording with the present state of a rank.
void Run::record_now(int32_t rank, Recording& about) const {
  std::memcpy(about.magic, magic, sizeof(magic));
  about.layout = layout;
  about.ranks = ranks();
  about.rank = rank;
  about.written = wall_clock();
  about.failed = failed() ? 1 : 0;
  about.failed_rank = about.failed ? header_->failed_rank : -1;
  if (about.failed) copy_string(about.reason, sizeof(about.reason), header_->reason);
  const auto copy = [this](Recording::Recorded& to, int32_t of) {
    std::memcpy(static_cast<void*>(&to.region), static_cast<const void*>(&region(of)), sizeof(to.region));
    if (is_local(of)) {
      std::memcpy(static_cast<void*>(&to.flight), static_cast<const void*>(&flight(of)), sizeof(to.flight));
    } else {
      for (const mimo_call_record* call : calls_of(of)) to.flight.calls[call->call % flight_records] = *call;
    }
  };
  copy(about.own_state, rank);
  if (about.failed_rank >= 0 && knows(about.failed_rank)) copy(about.failed_state, about.failed_rank);
}

void Run::restore(int32_t rank, const Recording::Recorded& recorded) {
  std::memcpy(static_cast<void*>(&region(rank)), static_cast<const void*>(&recorded.region), sizeof(recorded.region));
  std::memcpy(static_cast<void*>(&flight(rank)), static_cast<const void*>(&recorded.flight), sizeof(recorded.flight));
}

int32_t recorded_ranks(const std::string& path) { return read_recording(path)->ranks; }

void read_recordings(const std::vector<std::string>& paths, Run& run) {
  const Recording* first = nullptr;
  int64_t newest = 0;
  run.header().from_recordings = 1;
  std::vector<std::unique_ptr<Recording>> all;
  for (const std::string& path : paths) {
    all.push_back(read_recording(path));
    const Recording& recording = *all.back();
    if (recording.ranks != run.ranks()) throw Error(MIMO_ERROR_DATA, path + " is of another run than " + paths[0] + ".");
    run.restore(recording.rank, recording.own_state);
    newest = std::max(newest, recording.written);
    if (first == nullptr || recording.written < first->written) first = &recording;
  }
  for (const auto& recording : all) {
    if (recording->failed == 0) continue;
    const bool has_failed_state = recording->failed_rank >= 0 && recording->failed_state.region.pid != 0;
    if (has_failed_state) run.restore(recording->failed_rank, recording->failed_state);
    run.fail(recording->failed_rank, recording->reason);
  }
  if (run.failed()) return;
  const double before = static_cast<double>(newest - first->written) / nanoseconds;
  const auto absent = static_cast<size_t>(run.ranks()) - all.size();
  if (before > same_time) {
    run.fail(first->rank, "it stopped recording " + std::to_string(before).substr(0, 4) + " s before the last of the others");
  } else if (absent > 0) {
    const bool alone = all.size() == 1;
    run.fail(alone ? first->rank : -1,
             std::string(alone ? "it" : "those with recordings") + " ended without an error; " + std::to_string(absent) + " of " +
                 std::to_string(run.ranks()) + " ranks have left no recording, as ranks that finish do");
  } else {
    run.fail(-1, "all ranks ended at once without an error, as when their launcher or their host is ended");
  }
}

}  // namespace mimo
