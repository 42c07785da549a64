#include "device_group.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "collective.h"
#include "error.h"
#include "status.h"

namespace mimo::cuda {
namespace {

/// A message needs few channels, and a rank may talk to many.
constexpr int32_t message_channels = 8;
/// A call that takes longer counts as waiting for others.
constexpr int64_t patience = 1'000'000'000;

/// NCCL reads these when it starts; what the user has set stays.
void set_up_nccl(bool deterministic) {
  // Members connect when they make a communicator, not inside its first call: ranks may start calls of several groups in
  // different orders.
  setenv("NCCL_RUNTIME_CONNECT", "0", 0);
  if (!deterministic) return;
  // One order of additions, whatever it would choose for a size.
  setenv("NCCL_ALGO", "Ring", 0);
  setenv("NCCL_PROTO", "Simple", 0);
}

/// What members tell each other before they meet in NCCL.
struct Introduction {
  char gpu[16];  // its place on the bus
  ncclUniqueId ids[2];
};

Introduction introduce(const mimo_stream& stream) {
  Introduction own = {};
  check(cudaDeviceGetPCIBusId(own.gpu, sizeof(own.gpu), stream.device->index), "reading the device's place");
  return own;
}

/// NCCL would say "invalid usage".
void require_own_gpu(int32_t rank, const Introduction& of_rank, int32_t other, const Introduction& of_other) {
  if (std::strcmp(of_rank.gpu, of_other.gpu) != 0) return;
  throw Error(MIMO_ERROR_UNSUPPORTED, "Ranks " + std::to_string(rank) + " and " + std::to_string(other) +
                                          " use the same GPU (" + of_rank.gpu + "), which NCCL refuses; " +
                                          "with --distributed-backend shm ranks may share GPUs.");
}

/// The thread that looks at the calls of all groups of this process.
class Watch {
 public:
  /// Never destroyed: a process that fails ends with groups open.
  static Watch& instance() {
    static Watch& watch = *new Watch;
    return watch;
  }
  void add(Run& run, DeviceGroup* group) {
    std::lock_guard<std::mutex> lock(mutex_);
    run_ = &run;
    groups_.push_back(group);
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  }
  /// The thread ends with the last group: the run may be closed then.
  void remove(DeviceGroup* group) {
    std::thread ended;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      groups_.erase(std::remove(groups_.begin(), groups_.end(), group), groups_.end());
      if (groups_.empty()) ended = std::move(thread_);
    }
    if (ended.joinable()) ended.join();
  }

 private:
  void work() {
    for (;;) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (groups_.empty()) return;
        std::pair<int64_t, int64_t> oldest{-1, 0};
        for (DeviceGroup* group : groups_) {
          const std::pair<int64_t, int64_t> of = group->look();
          if (of.first >= 0 && (oldest.first < 0 || of.second < oldest.second)) oldest = of;
        }
        const bool waits = oldest.first >= 0 && monotonic_nanoseconds() - oldest.second > patience;
        run_->region(run_->rank()).waiting_call.store(waits ? oldest.first : -1);
      }
      usleep(20'000);
    }
  }

  std::mutex mutex_;
  std::vector<DeviceGroup*> groups_;
  Run* run_ = nullptr;
  std::thread thread_;
};

}  // namespace

DeviceGroup::DeviceGroup(Run& run, const std::string& name, std::vector<int32_t> ranks)
    : run_(run), host_(run, name, std::move(ranks)) {
  Watch::instance().add(run, this);
}

DeviceGroup::~DeviceGroup() {
  Watch::instance().remove(this);
  if (device_ >= 0) cudaSetDevice(device_);
  if (run_.failed() || run_.region(run_.rank()).phase != MIMO_RANK_PHASE_FINISHED) {
    // This rank ends early. Its communicators end with the process: closing them would wait for their members.
    for (auto& [lane, line] : lines_) line.communicator.release();
    return;
  }
  for (auto& [lane, line] : lines_) line.communicator->begin_finish();
  for (auto& [lane, line] : lines_) line.communicator->finish();
  for (auto& [lane, line] : lines_) {
    for (const Pending& one : line.pending) {
      if (cudaEventQuery(one.done) == cudaSuccess) run_.end_call(one.number);
      cudaEventDestroy(one.done);
    }
  }
  for (cudaEvent_t one : events_) cudaEventDestroy(one);
}

DeviceGroup::Line& DeviceGroup::line_of_all(mimo_stream& stream) {
  const auto known = lines_.find(Group::collectives);
  if (known != lines_.end()) return known->second;
  device_ = stream.device->index;
  set_up_nccl(stream.device->deterministic);
  Introduction own = introduce(stream);
  if (rank() == 0) own.ids[0] = new_unique_id();
  std::vector<Introduction> all(static_cast<size_t>(size()));
  host_.wait(host_.start(Group::collectives,
                         make_all_gather(host_, &own, all.data(), sizeof(own), MIMO_COLLECTIVE_EXCHANGE)));
  for (size_t member = 0; member < all.size(); ++member) {
    for (size_t other = 0; other < member; ++other) {
      require_own_gpu(host_.ranks()[other], all[other], host_.ranks()[member], all[member]);
    }
  }
  auto made = std::make_unique<Communicator>(run_, all[0].ids[0], size(), rank(), 0);
  std::lock_guard<std::mutex> lock(mutex_);
  Line& line = lines_[Group::collectives];
  line.communicator = std::move(made);
  return line;
}

DeviceGroup::Line& DeviceGroup::line_with(mimo_stream& stream, int32_t peer, bool sends) {
  MIMO_REQUIRE(peer >= 0 && peer < size() && peer != rank(), "A message between two members");
  const int32_t lane = sends ? host_.lane_to(peer) : host_.lane_from(peer);
  const auto known = lines_.find(lane);
  if (known != lines_.end()) return known->second;
  device_ = stream.device->index;
  set_up_nccl(stream.device->deterministic);
  // Both directions at once: a pair that meets for the first time may send both ways.
  const bool lower = rank() < peer;
  const Introduction own = introduce(stream);
  Introduction told = own;  // by the lower one; ids: upwards, downwards
  if (lower) {
    for (ncclUniqueId& id : told.ids) id = new_unique_id();
    host_.wait(host_.start(host_.lane_to(peer), make_send(host_, &told, sizeof(told), peer)));
  } else {
    host_.wait(host_.start(host_.lane_from(peer), make_receive(host_, &told, sizeof(told), peer)));
    const auto global = [&](int32_t member) { return host_.ranks()[static_cast<size_t>(member)]; };
    require_own_gpu(global(peer), told, global(rank()), own);
  }
  for (const bool up : {true, false}) {
    auto made = std::make_unique<Communicator>(run_, told.ids[up ? 0 : 1], 2, lower ? 0 : 1, message_channels);
    // The first message connects, and waits for its receiver to do so too: one of a byte does it here, where both are.
    Workspace byte(&stream, 1);
    made->queue("connecting", [&](ncclComm_t comm, cudaStream_t queue) {
      return up == lower ? nccl().Send(byte.as<void>(), 1, ncclUint8, lower ? 1 : 0, comm, queue)
                         : nccl().Recv(byte.as<void>(), 1, ncclUint8, lower ? 1 : 0, comm, queue);
    });
    check(cudaStreamSynchronize(made->stream()), "connecting");
    std::lock_guard<std::mutex> lock(mutex_);
    Line& line = lines_[up == lower ? host_.lane_to(peer) : host_.lane_from(peer)];
    line.communicator = std::move(made);
    line.peer = peer;
  }
  return lines_.at(lane);
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

int64_t DeviceGroup::start(mimo_stream& stream, int32_t lane, Line& line, int32_t kind, int64_t bytes,
                           const Body& body) {
  run_.require_alive();
  std::lock_guard<std::mutex> lock(mutex_);
  forget_finished(line);
  const cudaEvent_t before = event();
  const cudaStream_t queue = line.communicator->stream();
  check(cudaEventRecord(before, stream.handle), "recording an event");
  check(cudaStreamWaitEvent(queue, before, 0), "waiting for an event");
  events_.push_back(before);
  const int64_t sequence = ++line.started;
  const int64_t number = run_.begin_call(host_.name(), sequence, kind, bytes);
  line.communicator->queue(collective_name(kind), body);
  const cudaEvent_t done = event();
  check(cudaEventRecord(done, queue), "recording an event");
  line.pending.push_back({sequence, number, monotonic_nanoseconds(), done});
  return sequence * (1 + 2 * size()) + lane;
}

int64_t DeviceGroup::collective(mimo_stream& stream, int32_t kind, int64_t bytes, const Body& body) {
  return start(stream, Group::collectives, line_of_all(stream), kind, bytes, body);
}

int64_t DeviceGroup::send(mimo_stream& stream, const void* x, int64_t bytes, int32_t to) {
  MIMO_REQUIRE(bytes >= 0, "mimo_group_send");
  Line& line = line_with(stream, to, true);
  const int32_t there = rank() < to ? 1 : 0;
  return start(stream, host_.lane_to(to), line, MIMO_COLLECTIVE_SEND, bytes, [&](ncclComm_t comm, cudaStream_t queue) {
    return nccl().Send(x, static_cast<size_t>(bytes), ncclUint8, there, comm, queue);
  });
}

int64_t DeviceGroup::receive(mimo_stream& stream, void* x, int64_t bytes, int32_t from) {
  MIMO_REQUIRE(bytes >= 0, "mimo_group_receive");
  Line& line = line_with(stream, from, false);
  const int32_t there = rank() < from ? 1 : 0;
  return start(stream, host_.lane_from(from), line, MIMO_COLLECTIVE_RECEIVE, bytes,
               [&](ncclComm_t comm, cudaStream_t queue) {
                 return nccl().Recv(x, static_cast<size_t>(bytes), ncclUint8, there, comm, queue);
               });
}

void DeviceGroup::wait(mimo_stream& stream, int64_t ticket) {
  run_.require_alive();
  const int64_t lanes = 1 + 2 * size();
  std::lock_guard<std::mutex> lock(mutex_);
  const Line& line = lines_.at(static_cast<int32_t>(ticket % lanes));
  for (const Pending& one : line.pending) {
    if (one.sequence == ticket / lanes) {
      check(cudaStreamWaitEvent(stream.handle, one.done, 0), "waiting for an event");
      return;
    }
  }
  // Done already.
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

void DeviceGroup::give_up() {
  gave_up_ = true;
  for (auto& [lane, line] : lines_) {
    for (const Pending& one : line.pending) {
      std::vector<int32_t> missing;
      for (int32_t member = 0; member < size(); ++member) {
        if (member == rank()) continue;
        const int32_t global = host_.ranks()[static_cast<size_t>(member)];
        const bool absent = line.peer < 0 ? !run_.has_begun(global, host_.name(), one.sequence) : member == line.peer;
        if (absent) missing.push_back(global);
      }
      run_.fail_call(one.number, missing);
    }
    if (line.communicator) line.communicator->abort();
  }
}

std::pair<int64_t, int64_t> DeviceGroup::look() {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || device_ < 0) return {-1, 0};
  cudaSetDevice(device_);
  if (run_.failed()) {
    if (!gave_up_) give_up();
    return {-1, 0};
  }
  std::pair<int64_t, int64_t> oldest{-1, 0};
  for (auto& [lane, line] : lines_) {
    try {
      forget_finished(line);
    } catch (const Error&) {
      // The training thread meets it too, and says so.
      return {-1, 0};
    }
    if (line.pending.empty()) continue;
    const Pending& first = line.pending.front();
    if (oldest.first < 0 || first.started < oldest.second) oldest = {first.number, first.started};
  }
  return oldest;
}

}  // namespace mimo::cuda
