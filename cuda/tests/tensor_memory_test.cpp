// Collectives on tensors that the host cannot access, like a GPU's, give the same results as on host memory. The ranks
// are threads. Addresses of "far" memory fault on access; copies happen as late as settle(), and held bytes are
// overwritten by the next hold().
#include "tensor_memory.h"

#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>

#include "check.h"
#include "collective.h"

namespace {

using mimo::Group;

class FarMemory final : public mimo::TensorMemory {
 public:
  static void* address_of(void* host) { return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) ^ distance); }

  bool in_host() const override { return false; }
  void fetch(char* host, const char* tensor, int64_t bytes) override { copy(host, reach(tensor), bytes); }
  void store(char* tensor, const char* host, int64_t bytes) override { copy(reach(tensor), host, bytes); }
  void move(char* to, const char* from, int64_t bytes) override { copy(reach(to), reach(from), bytes); }
  void settle() override {
    for (const Copy& one : queued_) std::memmove(one.to, one.from, one.bytes);
    queued_.clear();
  }
  const char* hold(const char* tensor, int64_t bytes) override {
    settle();
    held_.assign(held_.size(), 0x55);
    held_.resize(std::max(held_.size(), static_cast<size_t>(bytes)));
    fetch(held_.data(), tensor, bytes);
    settle();
    return held_.data();
  }
  char* room(char*) override { return held_.data(); }

 private:
  static constexpr uintptr_t distance = uintptr_t{1} << 62;
  struct Copy {
    char* to;
    const char* from;
    size_t bytes;
  };
  static char* reach(const char* tensor) {
    return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(tensor) ^ distance);
  }
  void copy(char* to, const char* from, int64_t bytes) {
    if (bytes > 0) queued_.push_back({to, from, static_cast<size_t>(bytes)});
  }
  std::vector<Copy> queued_;
  std::vector<char> held_;
};

class Rank {
 public:
  Rank(const std::string& path, int32_t rank, int32_t size) : run_(path) {
    std::vector<int32_t> everyone(static_cast<size_t>(size));
    std::iota(everyone.begin(), everyone.end(), 0);
    run_.join(rank, 1);
    near_ = std::make_unique<Group>(run_, "near", everyone);
    far_ = std::make_unique<Group>(run_, "far", everyone, memory_);
  }

  void work() {
    const int32_t size = near_->size(), own = near_->rank(), next = (own + 1) % size, last = (own + size - 1) % size;
    // One round, several rounds, and a partial last round.
    for (const int64_t n : {0, 1, 1000, 8193, 250'001}) {
      for (const int32_t dtype : {MIMO_DTYPE_F32, MIMO_DTYPE_BF16}) {
        const int64_t bytes = n * (dtype == MIMO_DTYPE_F32 ? 4 : 2);
        for (const int32_t reduction : {MIMO_REDUCTION_SUM, MIMO_REDUCTION_MAX}) {
          compare("all_reduce", bytes, 0, [&](Group& group, char* x, char*) {
            group.wait(group.start(Group::collectives, mimo::make_all_reduce(group, x, n, dtype, reduction)));
          });
        }
        compare("reduce_scatter", size * bytes, bytes, [&](Group& group, char* x, char* y) {
          group.wait(group.start(Group::collectives, mimo::make_reduce_scatter(group, x, y, n, dtype)));
        });
        compare("reduce_scatter in place", size * bytes, 0, [&](Group& group, char* x, char*) {
          group.wait(group.start(Group::collectives,
                                 mimo::make_reduce_scatter(group, x, x + own * bytes, n, dtype)));
        });
      }
      compare("all_gather", n, size * n, [&](Group& group, char* x, char* y) {
        group.wait(group.start(Group::collectives,
                               mimo::make_all_gather(group, x, y, n, MIMO_COLLECTIVE_ALL_GATHER)));
      });
      for (int32_t root = 0; root < size; ++root) {
        compare("broadcast", n, 0, [&](Group& group, char* x, char*) {
          group.wait(group.start(Group::collectives, mimo::make_broadcast(group, x, n, root)));
        });
      }
      compare("send and receive", n, n, [&](Group& group, char* x, char* y) {
        const int64_t sent = group.start(group.lane_to(next), mimo::make_send(group, x, n, next));
        group.wait(group.start(group.lane_from(last), mimo::make_receive(group, y, n, last)));
        group.wait(sent);
      });
      const int64_t scale = n / 16, row_bytes = 12;
      std::vector<int32_t> rows(static_cast<size_t>(4 * size));
      for (int32_t member = 0, sent = 0, received = 0; member < size; ++member) {
        rows[static_cast<size_t>(member)] = sent;
        rows[static_cast<size_t>(size + member)] = static_cast<int32_t>((own + 2 * member) % 4 * scale);
        rows[static_cast<size_t>(2 * size + member)] = received;
        rows[static_cast<size_t>(3 * size + member)] = static_cast<int32_t>((member + 2 * own) % 4 * scale);
        sent += rows[static_cast<size_t>(size + member)];
        received += rows[static_cast<size_t>(3 * size + member)];
      }
      const int64_t most = 4 * scale * size * row_bytes;
      compare("all_to_all", most, most, [&](Group& group, char* x, char* y) {
        group.wait(group.start(Group::collectives, mimo::make_all_to_all(group, x, y, rows.data(), row_bytes)));
      });
      // Host values remain in host memory in a group whose tensors are far.
      std::vector<int32_t> told(static_cast<size_t>(size));
      far_->wait(far_->start(Group::collectives,
                             mimo::make_all_gather(*far_, &own, told.data(), 4, MIMO_COLLECTIVE_EXCHANGE)));
      expect(told.back() == size - 1, "exchange");
    }
    run_.leave();
  }

 private:
  /// Makes a call on near and on far memory and compares the results.
  void compare(const char* what, int64_t x_bytes, int64_t y_bytes, const std::function<void(Group&, char*, char*)>& call) {
    std::vector<char> x(static_cast<size_t>(x_bytes) + 1), y(static_cast<size_t>(y_bytes) + 1);
    uint32_t state = 12345u + static_cast<uint32_t>(near_->rank());
    for (char& byte : x) byte = static_cast<char>((state = state * 1664525u + 1013904223u) >> 24 & 0x3f);
    std::vector<char> far_x = x, far_y = y;
    call(*near_, x.data(), y.data());
    call(*far_, static_cast<char*>(FarMemory::address_of(far_x.data())),
         static_cast<char*>(FarMemory::address_of(far_y.data())));
    expect(far_x == x && far_y == y, what);
  }

  void expect(bool holds, const char* what) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (!holds) std::printf("rank %d: %s\n", near_->rank(), what);
    CHECK(holds);
  }

  mimo::Run run_;
  FarMemory memory_;
  std::unique_ptr<Group> near_, far_;
};

}  // namespace

int main() {
  for (const int32_t size : {2, 3}) {
    mimo::Run run(size, true, 60'000);
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] { Rank(run.path(), rank, size).work(); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  return failures;
}
