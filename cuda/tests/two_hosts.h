// A run of two hosts, whose four ranks are objects of this process.
#pragma once
#include <unistd.h>

#include <functional>
#include <memory>

#include "relay.h"
#include "run.h"

constexpr int32_t host_of_rank[4] = {0, 0, 1, 1};
constexpr uint8_t key[32] = {1, 2, 3, 4, 5, 6, 7, 8};

/// The runs of ranks 0 to 3; those of ranks 0 and 2 create the files of their hosts.
struct TwoHosts {
  std::unique_ptr<mimo::Run> of[4];
  int32_t port = 0;

  /// `both`: the second host connects at once.
  explicit TwoHosts(bool both = true) {
    for (const int32_t first : {0, 2}) {
      of[first] = std::make_unique<mimo::Run>(4, host_of_rank, host_of_rank[first], 60'000);
      of[first + 1] = std::make_unique<mimo::Run>(of[first]->path());
    }
    auto root = std::make_unique<mimo::Relay>(*of[0], key, nullptr, mimo::listen_for_children(*of[0], "127.0.0.1"));
    port = root->port();
    of[0]->set_relay(std::move(root));
    for (const int32_t rank : {0, 1}) join(rank);
    if (both) connect_second();
  }
  void connect_second() {
    auto link = mimo::connect_to_parent(*of[2], "127.0.0.1", port, key);
    of[2]->set_relay(std::make_unique<mimo::Relay>(*of[2], key, std::move(link), -1));
    for (const int32_t rank : {2, 3}) join(rank);
  }
  /// The ranks that relay end last, since their relays wait for the other ranks.
  ~TwoHosts() {
    for (auto& run : of) {
      if (run->header().own_host == 0 || joined_ == 4) run->leave();
    }
    for (const int32_t rank : {3, 1, 2, 0}) of[rank].reset();
  }

 private:
  int joined_ = 0;
  void join(int32_t rank) {
    mimo::RankRegion& own = of[rank]->region(rank);
    mimo::copy_string(own.module, sizeof(own.module), rank < 2 ? "encoder" : "language");
    of[rank]->join(rank, 1);
    ++joined_;
  }
};

inline bool within_seconds(double seconds, const std::function<bool()>& holds) {
  const int64_t end = mimo::monotonic_nanoseconds() + static_cast<int64_t>(seconds * 1e9);
  while (!holds()) {
    if (mimo::monotonic_nanoseconds() > end) return false;
    usleep(1000);
  }
  return true;
}
