#include "peer_rows.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "error.h"
#include "memory_pool.h"
#include "run.h"
#include "status.h"

namespace mimo::cuda {
namespace {

/// Size of an allocation that other processes open.
constexpr int64_t counter_bytes = 2 * most_peers * static_cast<int64_t>(sizeof(uint32_t));

struct Offer {
  int32_t made;
  cudaIpcMemHandle_t handle;
};

/// Whether `own` is true at every member.
bool all_agree(bool own, int32_t size, const PeerMemory::Tell& tell) {
  const int32_t word = own ? 1 : 0;
  std::vector<int32_t> words(static_cast<size_t>(size));
  tell(&word, words.data(), sizeof(word));
  return std::all_of(words.begin(), words.end(), [](int32_t one) { return one == 1; });
}

}  // namespace

PeerMemory::PeerMemory(mimo_device& device, int32_t size, int32_t rank, int64_t bytes, const Tell& tell)
    : device_(device), rank_(rank), addresses_(static_cast<size_t>(size)) {
  device.use();
  Offer offer{};
  // The pool allocates every block separately, so the IPC handle's base address is the block's.
  char* const own = static_cast<char*>(device.memory->allocate(this, bytes, MIMO_TAG_COMMUNICATION));
  offer.made = cudaIpcGetMemHandle(&offer.handle, own) == cudaSuccess ? 1 : 0;
  std::vector<Offer> offers(static_cast<size_t>(size));
  tell(&offer, offers.data(), sizeof(offer));
  for (int32_t member = 0; member < size; ++member) {
    char*& address = addresses_[static_cast<size_t>(member)];
    const Offer& theirs = offers[static_cast<size_t>(member)];
    if (member == rank) {
      address = own;
      continue;
    }
    void* opened = nullptr;
    if (theirs.made == 1 &&
        cudaIpcOpenMemHandle(&opened, theirs.handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess) {
      address = static_cast<char*>(opened);
    } else {
      open_ = false;
    }
  }
  cudaGetLastError();  // clears the error, which a later call would report
}

void PeerMemory::close_opened() {
  for (size_t member = 0; member < addresses_.size(); ++member) {
    if (static_cast<int32_t>(member) == rank_ || addresses_[member] == nullptr) continue;
    cudaIpcCloseMemHandle(addresses_[member]);
    addresses_[member] = nullptr;
  }
}

PeerMemory::~PeerMemory() {
  close_opened();
  device_.memory->free(this, addresses_[static_cast<size_t>(rank_)]);
}

PeerRows::PeerRows(mimo_device& device, int32_t size, int32_t rank, cudaStream_t queue, Tell tell)
    : device_(device), size_(size), rank_(rank), queue_(queue), tell_(std::move(tell)) {
  peers_.size = size;
  peers_.rank = rank;
}

PeerRows::~PeerRows() {
  window_.reset();
  counters_.reset();
  if (ended_ != nullptr) cudaFreeHost(ended_);
}

std::unique_ptr<PeerRows> PeerRows::meet(mimo_device& device, int32_t size, int32_t rank, cudaStream_t queue, Tell tell) {
  if (size > most_peers) return nullptr;
  device.use();
  std::unique_ptr<PeerRows> made(new PeerRows(device, size, rank, queue, std::move(tell)));
  made->counters_ = std::make_unique<PeerMemory>(device, size, rank, counter_bytes, made->tell_);
  if (!all_agree(made->counters_->open(), size, made->tell_)) return nullptr;
  if (!all_agree(made->counters_work(), size, made->tell_)) return nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&made->ended_), sizeof(int32_t), cudaHostAllocMapped), "cudaHostAlloc");
  *made->ended_ = 0;
  void* seen = nullptr;
  check(cudaHostGetDevicePointer(&seen, made->ended_, 0), "cudaHostGetDevicePointer");
  made->peers_.ended = static_cast<const int32_t*>(seen);
  return made;
}

/// Each member writes a word to every other member's memory: on machines that let GPUs open each other's memory but
/// lose writes to it, messages are used instead. The counters are zero on return.
bool PeerRows::counters_work() {
  const auto word_of = [](int32_t from, int32_t to) { return 0x5EED0000u + static_cast<uint32_t>(from * most_peers + to); };
  check(cudaMemset(counters_->of(rank_), 0, counter_bytes), "clearing memory");
  check(cudaDeviceSynchronize(), "clearing memory");
  bool works = all_agree(true, size_, tell_);
  for (int32_t member = 0; member < size_; ++member) {
    const uint32_t word = word_of(rank_, member);
    auto* const place = reinterpret_cast<uint32_t*>(counters_->of(member)) + rank_;
    works = works && cudaMemcpy(place, &word, sizeof(word), cudaMemcpyHostToDevice) == cudaSuccess;
    peers_.counters[member] = reinterpret_cast<uint32_t*>(counters_->of(member));
  }
  check(cudaDeviceSynchronize(), "a copy to another GPU");
  works = all_agree(works, size_, tell_);
  uint32_t words[most_peers] = {};
  check(cudaMemcpy(words, counters_->of(rank_), sizeof(words), cudaMemcpyDeviceToHost), "a copy to the host");
  for (int32_t member = 0; member < size_; ++member) works = works && words[member] == word_of(member, rank_);
  check(cudaMemset(counters_->of(rank_), 0, counter_bytes), "clearing memory");
  check(cudaDeviceSynchronize(), "clearing memory");
  cudaGetLastError();
  return works;
}

void PeerRows::reserve(const mimo_row_exchange& rows) {
  int64_t bytes = beside_offset(rows.stage_rows, rows.row_bytes);
  if (rows.beside_x != nullptr) bytes += rows.stage_rows * rows.beside_row_bytes;
  if (bytes <= window_bytes_) return;
  check(cudaStreamSynchronize(queue_), "exchanges of rows");
  // First all members finish their exchanges; then all close each other's windows.
  all_agree(true, size_, tell_);
  if (window_) window_->close_opened();
  all_agree(true, size_, tell_);
  window_.reset();
  window_bytes_ = 0;
  window_ = std::make_unique<PeerMemory>(device_, size_, rank_, bytes, tell_);
  if (!all_agree(window_->open(), size_, tell_)) {
    throw Error(MIMO_ERROR_DEVICE, "GPUs of this host cannot open each other's memory of " + std::to_string(bytes) +
                                       " bytes for rows of experts, though they could open less.");
  }
  for (int32_t member = 0; member < size_; ++member) peers_.windows[member] = window_->of(member);
  window_bytes_ = bytes;
}

void PeerRows::exchange(const mimo_row_exchange& rows, cudaStream_t queue) {
  const uint32_t number = ++exchanges_;
  char* const own = peers_.windows[rank_];
  char* const beside = own + beside_offset(rows.stage_rows, rows.row_bytes);
  const auto copy = [&](void* to, const void* from, int64_t bytes) {
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, queue), "a copy on the device");
  };
  wait_for_peers(peers_, Moment::done, number - 1, queue);
  if (rows.stage == MIMO_ROW_STAGE_SENDER) {
    copy(own, rows.x, rows.x_rows * rows.row_bytes);
    if (rows.beside_x != nullptr) copy(beside, rows.beside_x, rows.x_rows * rows.beside_row_bytes);
  } else {
    copy_peer_rows(peers_, rows, queue);
  }
  tell_peers(peers_, Moment::filled, number, queue);
  wait_for_peers(peers_, Moment::filled, number, queue);
  if (rows.stage == MIMO_ROW_STAGE_SENDER) {
    copy_peer_rows(peers_, rows, queue);
  } else {
    copy(rows.y, own, rows.y_rows * rows.row_bytes);
    if (rows.beside_y != nullptr) copy(rows.beside_y, beside, rows.y_rows * rows.beside_row_bytes);
  }
  tell_peers(peers_, Moment::done, number, queue);
}

void PeerRows::give_up() { __atomic_store_n(ended_, 1, __ATOMIC_RELEASE); }

void PeerRows::finish() {
  device_.use();
  if (cudaStreamSynchronize(queue_) != cudaSuccess) return;
  const int64_t end = monotonic_nanoseconds() + 5'000'000'000;
  for (bool waiting = true; waiting && monotonic_nanoseconds() < end;) {
    uint32_t told[2][most_peers];
    if (cudaMemcpy(told, counters_->of(rank_), sizeof(told), cudaMemcpyDeviceToHost) != cudaSuccess) return;
    waiting = false;
    for (int32_t member = 0; member < size_; ++member) {
      waiting = waiting || (member != rank_ && told[static_cast<int32_t>(Moment::done)][member] != exchanges_);
    }
    if (waiting) usleep(100);
  }
}

}  // namespace mimo::cuda
