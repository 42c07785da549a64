#include "device_group.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "collective.h"
#include "error.h"
#include "group_watch.h"
#include "memory_pool.h"
#include "status.h"

namespace mimo::cuda {
namespace {

/// Few channels suffice for messages, and a rank may have many peers.
constexpr int32_t message_channels = 8;
constexpr int32_t value_channels = 1;

/// NCCL reads these variables at start-up; values set by the user are kept.
void set_up_nccl(bool deterministic) {
  // Members connect when a communicator is created, not inside its first call: ranks may start the first calls of
  // several groups in different orders.
  setenv("NCCL_RUNTIME_CONNECT", "0", 0);
  if (!deterministic) return;
  // Fixes the reduction order, which NCCL otherwise chooses by message size.
  setenv("NCCL_ALGO", "Ring", 0);
  setenv("NCCL_PROTO", "Simple", 0);
}

}  // namespace

DeviceGroup::DeviceGroup(Run& run, const std::string& name, std::vector<int32_t> ranks)
    : run_(run), name_(name), ranks_(std::move(ranks)), rank_(place_among(ranks_, run.rank())) {
  MIMO_REQUIRE(size() >= 2, "mimo_group_create");
  MIMO_REQUIRE(rank_ >= 0, "mimo_group_create");
  MIMO_REQUIRE(run.device != nullptr, "mimo_group_create (call mimo_run_set_backend first)");
  const auto local = [&](int32_t rank) { return run.is_local(rank); };
  if (std::all_of(ranks_.begin(), ranks_.end(), local)) host_ = std::make_unique<Group>(run, name_, ranks_);
  GroupWatch::instance().add(run, this);
}

DeviceGroup::~DeviceGroup() {
  GroupWatch::instance().remove(this);
  if (device_ >= 0) cudaSetDevice(device_);
  if (run_.failed() || run_.region(run_.rank()).phase != MIMO_RANK_PHASE_FINISHED) {
    if (run_.failed() && run_.spans_hosts()) {
      run_.await_begun();
      std::lock_guard<std::mutex> lock(mutex_);
      note_missing();
    }
    // This rank ends early. Its communicators, and the memory that their kernels use, are leaked to process exit:
    // closing them would wait for their members.
    static_cast<void>(peer_rows_.release());
    for (auto& [number, line] : lines_) line.communicator.release();
    for (auto& one : staging_) one.release();
    return;
  }
  if (peer_rows_) peer_rows_->finish();
  for (auto& [number, line] : lines_) line.communicator->begin_finish();
  for (auto& [number, line] : lines_) line.communicator->finish();
  for (auto& [number, line] : lines_) {
    for (const Pending& one : line.pending) {
      if (cudaEventQuery(one.done) == cudaSuccess) run_.end_call(one.number);
      cudaEventDestroy(one.done);
    }
  }
  for (cudaEvent_t one : events_) cudaEventDestroy(one);
}

/// To be called before the first communicator is created.
void DeviceGroup::prepare() {
  device_ = run_.device->index;
  check(cudaSetDevice(device_), "choosing a device");
  set_up_nccl(run_.device->deterministic);
  // NCCL allocates past the pool, whose blocks that are not live may fill the device.
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "reading the free memory");
  if (free < communicator_bytes) run_.device->memory->trim();
  char gpu[16] = {};
  check(cudaDeviceGetPCIBusId(gpu, sizeof(gpu), device_), "reading the device's place");
  run_.claim_gpu(gpu);
}

/// Key under which the NCCL identifier is posted: equal on all members, distinct for every group and purpose.
uint64_t DeviceGroup::key_for(const std::string& what) {
  const uint64_t key = hash(group_key(name_, ranks_), what.data(), what.size());
  const int64_t count = run_.next_use(key);
  return hash(key, &count, sizeof(count));
}

DeviceGroup::Line& DeviceGroup::line_of_members(int32_t number, int32_t channels) {
  const auto known = lines_.find(number);
  if (known != lines_.end()) return known->second;
  prepare();
  const uint64_t key = key_for(number == all ? "all" : "values");
  const PostingScope scope = host_ ? PostingScope::host : PostingScope::run;
  ncclUniqueId id;
  if (rank() == 0) {
    id = new_unique_id();
    run_.post(key, &id, sizeof(id), scope);
  } else {
    run_.await_posting(key, &id, sizeof(id), scope);
  }
  auto made = std::make_unique<Communicator>(run_, id, size(), rank(), channels);
  std::lock_guard<std::mutex> lock(mutex_);
  Line& line = lines_[number];
  line.communicator = std::move(made);
  return line;
}

/// The line of messages to or from a member; `alone`: creates this direction only.
DeviceGroup::Line& DeviceGroup::line_with(int32_t peer, bool sends, bool alone) {
  MIMO_REQUIRE(peer >= 0 && peer < size() && peer != rank(), "A message between two members");
  const int32_t number = sends ? to(peer) : from(peer);
  const auto known = lines_.find(number);
  if (known != lines_.end()) return known->second;
  // Both directions in a fixed order: when a pair first communicates, each side may be the sender.
  for (const bool up : {true, false}) {
    const bool outwards = up == (rank() < peer);
    if (!(alone && outwards != sends)) make_line_with(peer, outwards);
  }
  return lines_.at(number);
}

void DeviceGroup::make_line_with(int32_t peer, bool sends) {
  const int32_t number = sends ? to(peer) : from(peer);
  if (lines_.count(number) > 0) return;
  prepare();
  const bool lower = rank() < peer;
  const std::string pair = std::to_string(std::min(rank(), peer)) + " " + std::to_string(std::max(rank(), peer));
  const uint64_t key = key_for(pair + (sends == lower ? " up" : " down"));
  const PostingScope scope = run_.is_local(ranks_[static_cast<size_t>(peer)]) ? PostingScope::host : PostingScope::run;
  ncclUniqueId id;
  if (lower) {
    id = new_unique_id();
    run_.post(key, &id, sizeof(id), scope);
  } else {
    run_.await_posting(key, &id, sizeof(id), scope);
  }
  auto made = std::make_unique<Communicator>(run_, id, 2, lower ? 0 : 1, message_channels);
  // A first message connects, which waits for the receiver's call too; here both sides are present, so a byte is sent.
  // Its buffer belongs to no operation: the communicator's stream does not wait for queued kernels.
  ValueStaging& byte = idle_staging(staging_);
  byte.reserve(1);
  made->queue("connecting", [&](ncclComm_t comm, cudaStream_t queue) {
    return sends ? nccl().Send(byte.device(), 1, ncclUint8, lower ? 1 : 0, comm, queue)
                 : nccl().Recv(byte.device(), 1, ncclUint8, lower ? 1 : 0, comm, queue);
  });
  check(cudaStreamSynchronize(made->stream()), "connecting");
  std::lock_guard<std::mutex> lock(mutex_);
  Line& line = lines_[number];
  line.communicator = std::move(made);
  line.peer = peer;
}

void DeviceGroup::barrier() {
  if (host_) mimo::barrier(*host_);
  else exchange_between_hosts(MIMO_COLLECTIVE_BARRIER, nullptr, nullptr, 0);
}

void DeviceGroup::exchange(const void* x, void* y, int64_t bytes) {
  if (host_) mimo::exchange(*host_, x, y, bytes);
  else exchange_between_hosts(MIMO_COLLECTIVE_EXCHANGE, x, y, bytes);
}

/// Goes through the GPUs, because NCCL knows the fast paths between hosts. A barrier moves a byte.
void DeviceGroup::exchange_between_hosts(int32_t kind, const void* x, void* y, int64_t bytes) {
  run_.require_alive();
  Line& line = line_of_members(values(), value_channels);
  check(cudaSetDevice(device_), "choosing a device");
  const auto part = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  const size_t whole = part * static_cast<size_t>(size());
  ValueStaging& staging = idle_staging(staging_);
  staging.reserve(static_cast<int64_t>(part + whole));
  std::memset(staging.host(), 0, part);
  if (bytes > 0) std::memcpy(staging.host(), x, static_cast<size_t>(bytes));
  char* const gathered = staging.device() + part;
  const cudaStream_t stream = line.communicator->stream();
  cudaEvent_t done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    forget_finished(line);
    check(cudaMemcpyAsync(staging.device(), staging.host(), part, cudaMemcpyHostToDevice, stream), "a copy");
    done = queue(line, kind, bytes, [&](ncclComm_t comm, cudaStream_t at) {
      return nccl().AllGather(staging.device(), gathered, part, ncclUint8, comm, at);
    });
    check(cudaMemcpyAsync(staging.host() + part, gathered, whole, cudaMemcpyDeviceToHost, stream), "a copy");
    check(cudaEventRecord(done, stream), "recording an event");
    staging.used_by(stream);
  }
  if (y == nullptr && bytes > 0) return;
  for (int64_t spins = 0;; ++spins) {
    const cudaError_t state = cudaEventQuery(done);
    if (state == cudaSuccess) break;
    run_.require_alive();
    if (state != cudaErrorNotReady) check(state, "an exchange between hosts");
    if (spins > 1000) usleep(20);
  }
  // In a failed run the communication was aborted, not completed.
  run_.require_alive();
  std::lock_guard<std::mutex> lock(mutex_);
  forget_finished(line);
  if (bytes > 0) std::memcpy(y, staging.host() + part, whole);
}

PeerRows* DeviceGroup::peer_rows() {
  if (met_peers_) return peer_rows_.get();
  if (host_) {
    const Line& line = line_of_members(all, 0);
    const auto tell = [this](const void* x, void* y, int64_t bytes) { exchange(x, y, bytes); };
    auto made = PeerRows::meet(*run_.device, size(), rank(), line.communicator->stream(), tell);
    std::lock_guard<std::mutex> lock(mutex_);
    peer_rows_ = std::move(made);
  }
  met_peers_ = true;
  return peer_rows_.get();
}

cudaEvent_t DeviceGroup::event() {
  if (events_.empty()) {
    cudaEvent_t made = nullptr;
    check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "creating an event");
    return made;
  }
  cudaEvent_t taken = events_.back();
  events_.pop_back();
  return taken;
}

/// Queues a call and records it for the watch; returns the event recorded after it.
cudaEvent_t DeviceGroup::queue(Line& line, int32_t kind, int64_t bytes, const Body& body) {
  const int64_t sequence = ++line.started;
  const int64_t number = run_.begin_call(name_, sequence, kind, bytes);
  if (host_ == nullptr) run_.record_begun(name_, sequence, kind);
  line.communicator->queue(collective_name(kind), body);
  const cudaEvent_t done = event();
  check(cudaEventRecord(done, line.communicator->stream()), "recording an event");
  line.pending.push_back({sequence, number, monotonic_nanoseconds(), done});
  return done;
}

int64_t DeviceGroup::start(mimo_stream& stream, int32_t number, Line& line, int32_t kind, int64_t bytes,
                           const Body& body) {
  run_.require_alive();
  std::lock_guard<std::mutex> lock(mutex_);
  forget_finished(line);
  const cudaEvent_t before = event();
  check(cudaEventRecord(before, stream.handle()), "recording an event");
  check(cudaStreamWaitEvent(line.communicator->stream(), before, 0), "waiting for an event");
  events_.push_back(before);
  queue(line, kind, bytes, body);
  return line.started * line_numbers() + number;
}

int64_t DeviceGroup::collective(mimo_stream& stream, int32_t kind, int64_t bytes, const Body& body) {
  return start(stream, all, line_of_members(all, 0), kind, bytes, body);
}

int64_t DeviceGroup::send(mimo_stream& stream, const void* x, int64_t bytes, int32_t peer) {
  MIMO_REQUIRE(bytes >= 0, "mimo_group_send");
  Line& line = line_with(peer, true, bytes == 0);
  const int32_t there = rank() < peer ? 1 : 0;
  return start(stream, to(peer), line, MIMO_COLLECTIVE_SEND, bytes, [&](ncclComm_t comm, cudaStream_t queue) {
    return nccl().Send(x, static_cast<size_t>(bytes), ncclUint8, there, comm, queue);
  });
}

int64_t DeviceGroup::receive(mimo_stream& stream, void* x, int64_t bytes, int32_t peer) {
  MIMO_REQUIRE(bytes >= 0, "mimo_group_receive");
  Line& line = line_with(peer, false, bytes == 0);
  const int32_t there = rank() < peer ? 1 : 0;
  return start(stream, from(peer), line, MIMO_COLLECTIVE_RECEIVE, bytes, [&](ncclComm_t comm, cudaStream_t queue) {
    return nccl().Recv(x, static_cast<size_t>(bytes), ncclUint8, there, comm, queue);
  });
}

void DeviceGroup::wait(mimo_stream& stream, int64_t ticket) {
  run_.require_alive();
  std::lock_guard<std::mutex> lock(mutex_);
  const Line& line = lines_.at(static_cast<int32_t>(ticket % line_numbers()));
  for (const Pending& one : line.pending) {
    if (one.sequence == ticket / line_numbers()) {
      check(cudaStreamWaitEvent(stream.handle(), one.done, 0), "waiting for an event");
      return;
    }
  }
  // A call that is not listed is done.
}

void DeviceGroup::forget_finished(Line& line) {
  while (!line.pending.empty()) {
    const Pending& oldest = line.pending.front();
    const cudaError_t state = cudaEventQuery(oldest.done);
    if (state != cudaSuccess) {
      if (state != cudaErrorNotReady) check(state, "a collective");
      return;
    }
    run_.end_call(oldest.number);
    events_.push_back(oldest.done);
    line.pending.pop_front();
  }
}

/// Notes the members that had not started the calls which this rank has pending.
void DeviceGroup::note_missing() {
  if (std::exchange(noted_, true)) return;
  for (auto& [number, line] : lines_) {
    for (const Pending& one : line.pending) {
      std::vector<int32_t> missing;
      for (int32_t member = 0; member < size(); ++member) {
        if (member == rank()) continue;
        const int32_t global = ranks_[static_cast<size_t>(member)];
        const bool absent = line.peer < 0 ? !run_.has_begun(global, name_, number == values(), one.sequence)
                                          : member == line.peer;
        if (absent) missing.push_back(global);
      }
      run_.fail_call(one.number, missing);
    }
  }
}

std::pair<int64_t, int64_t> DeviceGroup::look(std::vector<ncclComm_t>& ended) {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || device_ < 0) return {-1, 0};
  cudaSetDevice(device_);
  if (run_.failed()) {
    // The missing ranks of other hosts are known a moment later.
    if (run_.knows_begun()) note_missing();
    __atomic_store_n(&run_.device->communication_ended, true, __ATOMIC_RELEASE);
    if (peer_rows_) peer_rows_->give_up();
    for (auto& [number, line] : lines_) {
      const ncclComm_t handle = line.communicator ? line.communicator->give_up() : nullptr;
      if (handle != nullptr) ended.push_back(handle);
    }
    return {-1, 0};
  }
  std::pair<int64_t, int64_t> oldest{-1, 0};
  for (auto& [number, line] : lines_) {
    try {
      forget_finished(line);
    } catch (const Error&) {
      // The training thread gets the same error and reports it.
      return {-1, 0};
    }
    if (line.pending.empty()) continue;
    const Pending& first = line.pending.front();
    if (oldest.first < 0 || first.started < oldest.second) oldest = {first.number, first.started};
  }
  return oldest;
}

}  // namespace mimo::cuda
