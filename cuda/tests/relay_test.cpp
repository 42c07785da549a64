// A run of two hosts, whose four ranks are objects of this process: postings arrive everywhere, as does a failure, with
// the calls that the ranks had begun. relay_authentication_test.cpp tests unauthenticated connections.
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>

#include "check.h"
#include "status.h"
#include "two_hosts.h"

namespace {

void postings_arrive() {
  TwoHosts hosts;
  const char from[4][12] = {"by rank 0", "by rank 1", "by rank 2", "by rank 3"};
  for (uint64_t rank = 0; rank < 4; ++rank) {
    hosts.of[rank]->post(100 + rank, from[rank], sizeof(from[rank]), mimo::PostingScope::run);
  }
  hosts.of[2]->post(200, "here", 5, mimo::PostingScope::host);
  for (const auto& run : hosts.of) {
    for (uint64_t rank = 0; rank < 4; ++rank) {
      char read[12] = {};
      run->await_posting(100 + rank, read, sizeof(read), mimo::PostingScope::run);
      CHECK(std::strcmp(read, from[rank]) == 0);
    }
  }
  // A posting of scope host stays on its host; host 0 receives only those that its ranks request.
  CHECK(hosts.of[0]->board().postings == 4);
  CHECK(hosts.of[2]->board().postings == 5);
  // Identities and progress of ranks arrive at other hosts.
  for (int64_t rank = 0; rank < 4; ++rank) hosts.of[rank]->region(static_cast<int32_t>(rank)).step = 17 + rank;
  for (const auto& run : hosts.of) {
    CHECK(within_seconds(5, [&] { return run->progress_of_run().step == 17 && run->progress_of_run().joined == 4; }));
  }
  CHECK(within_seconds(5, [&] { return hosts.of[1]->region(3).host[0] != 0; }));
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
      hosts.of[rank]->record_begun("world", sequence, MIMO_COLLECTIVE_ALL_REDUCE);
      if (sequence < 3) hosts.of[rank]->end_call(number);
      else hosts.of[rank]->region(rank).waiting_call = number;
    }
  }
  hosts.of[3]->fail(3, "it ran out of patience");
  for (const auto& run : hosts.of) {
    CHECK(within_seconds(2, [&] { return run->failed(); }));
    CHECK(run->header().failed_rank == 3);
    CHECK(std::strcmp(run->header().reason, "it ran out of patience") == 0);
    run->await_begun();
    CHECK(run->knows_begun());
    for (const int32_t rank : {0, 1, 3}) CHECK(run->has_begun(rank, "world", false, 3));
    CHECK(run->has_begun(2, "world", false, 2));
    CHECK(!run->has_begun(2, "world", false, 3));
    CHECK(!run->has_begun(3, "world", true, 1));
  }
  // A call that a rank records after the failure arrives at host 0.
  hosts.of[3]->fail_call(2, {2});
  hosts.of[0]->settle();
  const mimo_call_record& record = hosts.of[0]->remote_calls(3).calls[0];
  CHECK(record.call == 2 && record.state == MIMO_CALL_STATE_FAILED && record.missing_count == 1 && record.missing[0] == 2);
  CHECK(hosts.of[0]->region(3).waiting_call == 2);
  CHECK(hosts.of[1]->may_diagnose() && !hosts.of[2]->may_diagnose());
}

void a_lost_host_is_named() {
  TwoHosts hosts;
  CHECK(within_seconds(5, [&] { return hosts.of[0]->region(2).host[0] != 0; }));
  // For the root, a closed socket looks like a killed process.
  for (int32_t socket = 3; socket < 256; ++socket) {
    sockaddr_storage peer{};
    socklen_t length = sizeof(peer);
    if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &length) == 0) shutdown(socket, SHUT_RDWR);
  }
  CHECK(within_seconds(5, [&] { return hosts.of[0]->failed() && hosts.of[3]->failed(); }));
  CHECK(hosts.of[0]->header().failed_rank == 2);
  CHECK(std::strstr(hosts.of[0]->header().reason, "cut off") != nullptr);
  // On the second host, host 0 is the lost host.
  CHECK(hosts.of[3]->header().failed_rank == 0);
  CHECK(hosts.of[3]->may_diagnose());
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
  a_gpu_has_one_rank();
  return failures == 0 ? 0 : 1;
}
