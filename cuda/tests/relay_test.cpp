// A run of two hosts, whose four ranks are objects of this process: what is posted arrives everywhere, a failure too, with
// what the ranks had begun, and nobody who does not know the key is heard.
#include "relay.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>

#include "check.h"
#include "status.h"

namespace {

using mimo::Run;

constexpr int32_t host_of_rank[4] = {0, 0, 1, 1};
const uint8_t key[32] = {1, 2, 3, 4, 5, 6, 7, 8};

/// The runs of ranks 0 to 3: 0 and 2 made the files of their hosts.
struct TwoHosts {
  std::unique_ptr<Run> of[4];

  explicit TwoHosts(const uint8_t* second_key = key) {
    for (const int32_t first : {0, 2}) {
      of[first] = std::make_unique<Run>(4, false, 60'000);
      of[first]->place(host_of_rank, host_of_rank[first]);
      of[first + 1] = std::make_unique<Run>(of[first]->path());
    }
    auto centre = mimo::listen_for_hosts(*of[0], key);
    const int32_t port = centre->port();
    of[0]->relay_through(std::move(centre));
    of[2]->relay_through(mimo::connect_to_centre(*of[2], "127.0.0.1", port, second_key));
    for (int32_t rank = 0; rank < 4; ++rank) {
      mimo::RankRegion& own = of[rank]->region(rank);
      mimo::copy_string(own.module, sizeof(own.module), rank < 2 ? "encoder" : "language");
      of[rank]->join(rank);
    }
  }
  /// The last to go are those whose relays wait for the others.
  ~TwoHosts() {
    for (auto& run : of) run->leave();
    for (const int32_t rank : {3, 1, 2, 0}) of[rank].reset();
  }
};

bool within_seconds(double seconds, const std::function<bool()>& holds) {
  const int64_t end = mimo::monotonic_nanoseconds() + static_cast<int64_t>(seconds * 1e9);
  while (!holds()) {
    if (mimo::monotonic_nanoseconds() > end) return false;
    usleep(1000);
  }
  return true;
}

void postings_arrive() {
  TwoHosts hosts;
  const char from[4][12] = {"by rank 0", "by rank 1", "by rank 2", "by rank 3"};
  for (uint64_t rank = 0; rank < 4; ++rank) hosts.of[rank]->post(100 + rank, from[rank], sizeof(from[rank]));
  for (const auto& run : hosts.of) {
    for (uint64_t rank = 0; rank < 4; ++rank) {
      char read[12] = {};
      run->read_posted(100 + rank, read, sizeof(read));
      CHECK(std::strcmp(read, from[rank]) == 0);
    }
    CHECK(run->board().count == 4);
  }
  // What others look at: names and progress.
  hosts.of[3]->region(3).step = 17;
  CHECK(within_seconds(5, [&] { return hosts.of[1]->region(3).step == 17; }));
  CHECK(std::strcmp(hosts.of[1]->region(3).module, "language") == 0);
  CHECK(within_seconds(5, [&] { return std::strcmp(hosts.of[3]->region(1).module, "encoder") == 0; }));
  CHECK(!hosts.of[0]->failed() && !hosts.of[2]->failed());
}

void failures_arrive() {
  TwoHosts hosts;
  // Ranks 0, 1 and 3 began the group's third collective, rank 2 only its second.
  for (const int32_t rank : {0, 1, 2, 3}) {
    for (int64_t sequence = 1; sequence <= (rank == 2 ? 2 : 3); ++sequence) {
      const int64_t number = hosts.of[rank]->begin_call("world", sequence, MIMO_COLLECTIVE_ALL_REDUCE, 64);
      if (sequence < 3) hosts.of[rank]->end_call(number);
      else hosts.of[rank]->region(rank).waiting_call = number;
    }
  }
  hosts.of[3]->fail(3, "it ran out of patience");
  for (const auto& run : hosts.of) {
    CHECK(within_seconds(2, [&] { return run->failed(); }));
    CHECK(run->header().failed_rank == 3);
    CHECK(std::strcmp(run->header().reason, "it ran out of patience") == 0);
    run->await_mirrored();
    CHECK(run->mirrored());
    for (const int32_t rank : {0, 1, 3}) CHECK(run->has_begun(rank, "world", false, 3));
    CHECK(run->has_begun(2, "world", false, 2));
    CHECK(!run->has_begun(2, "world", false, 3));
    CHECK(!run->has_begun(3, "world", true, 1));
  }
  // What a rank notes after the failure reaches the host of rank 0.
  hosts.of[3]->fail_call(2, {2});
  hosts.of[0]->settle();
  const mimo_call_record& noted = hosts.of[0]->region(3).flight[2];
  CHECK(noted.state == MIMO_CALL_STATE_FAILED && noted.missing_count == 1 && noted.missing[0] == 2);
  CHECK(hosts.of[0]->region(3).waiting_call == 2);
  CHECK(hosts.of[1]->may_diagnose() && !hosts.of[2]->may_diagnose());
}

void a_lost_host_is_named() {
  TwoHosts hosts;
  CHECK(within_seconds(5, [&] { return hosts.of[0]->region(2).host[0] != 0; }));
  // As if its process were killed: the socket is all that the centre sees of it.
  for (int32_t socket = 3; socket < 256; ++socket) {
    sockaddr_storage peer{};
    socklen_t length = sizeof(peer);
    if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &length) == 0) shutdown(socket, SHUT_RDWR);
  }
  CHECK(within_seconds(5, [&] { return hosts.of[0]->failed() && hosts.of[3]->failed(); }));
  CHECK(hosts.of[0]->header().failed_rank == 2);
  CHECK(std::strstr(hosts.of[0]->header().reason, "cut off") != nullptr);
  // From there it is the host of rank 0 that is gone.
  CHECK(hosts.of[3]->header().failed_rank == 0);
  CHECK(hosts.of[3]->may_diagnose());
}

void strangers_are_not_heard() {
  uint8_t wrong[32] = {9};
  TwoHosts hosts(wrong);
  hosts.of[2]->post(7, "?", 1);
  usleep(300'000);
  CHECK(hosts.of[0]->board().count == 0);
  CHECK(hosts.of[0]->region(3).pid == 0);
  hosts.of[0]->fail(-1, "the end");
  hosts.of[2]->fail(-1, "the end");
}

void a_gpu_has_one_rank() {
  TwoHosts hosts;
  hosts.of[0]->claim_gpu("0000:1a:00.0");
  hosts.of[2]->claim_gpu("0000:1a:00.0");  // of another host
  hosts.of[0]->claim_gpu("0000:1a:00.0");  // again
  bool refused = false;
  try {
    hosts.of[1]->claim_gpu("0000:1a:00.0");
  } catch (const mimo::Error& error) {
    refused = std::strstr(error.what(), "Ranks 0 and 1 use the same GPU") != nullptr;
  }
  CHECK(refused);
}

}  // namespace

int main() {
  postings_arrive();
  failures_arrive();
  a_lost_host_is_named();
  strangers_are_not_heard();
  a_gpu_has_one_rank();
  return failures == 0 ? 0 : 1;
}
