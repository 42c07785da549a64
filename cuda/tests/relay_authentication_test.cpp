// Unauthenticated connections to a relay: a flood, connections that send nothing or byte by byte, wrong proofs. The other host is
// still accepted, memory and descriptors stay bounded, and then the port is closed. A host that authenticates and then sends a
// message with a wrong tag fails the run, with the reason.
#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "status.h"
#include "two_hosts.h"

namespace {

using mimo::MessageType;

int connect_to(int32_t port) {
  const int opened = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, "127.0.0.1", &at.sin_addr);
  if (connect(opened, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0) return opened;
  const int code = errno;
  close(opened);
  errno = code;
  return -1;
}

/// Whether the other side has closed the connection. Discards received bytes.
bool ended(int socket) {
  char part[4096];
  const ssize_t count = recv(socket, part, sizeof(part), MSG_DONTWAIT);
  return count == 0 || (count < 0 && errno != EAGAIN);
}

int64_t resident_bytes() {
  long all = 0, resident = 0;
  FILE* file = std::fopen("/proc/self/statm", "r");
  CHECK(file != nullptr && std::fscanf(file, "%ld %ld", &all, &resident) == 2);
  if (file != nullptr) std::fclose(file);
  return resident * sysconf(_SC_PAGESIZE);
}

int descriptors() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

/// Connects the second host and checks that both hosts receive each other's messages.
void the_run_begins(TwoHosts& hosts) {
  const int64_t began = mimo::monotonic_nanoseconds();
  hosts.connect_second();
  CHECK(mimo::monotonic_nanoseconds() - began < 5'000'000'000);
  hosts.of[3]->post(7, "yes", 4, mimo::PostingScope::run);
  char read[4];
  hosts.of[1]->await_posting(7, read, sizeof(read), mimo::PostingScope::run);
  CHECK(std::strcmp(read, "yes") == 0);
  CHECK(within_seconds(5, [&] { return hosts.of[0]->region(3).host[0] != 0; }));
  CHECK(!hosts.of[0]->failed() && !hosts.of[2]->failed());
}

void a_flood_fills_nothing() {
  for (const uint32_t type : {99u, 1u, 4u}) {
    TwoHosts hosts(false);
    std::atomic<bool> over{false};
    std::vector<std::thread> flooders;
    for (int i = 0; i < 3; ++i) {
      flooders.emplace_back([&] {
        std::vector<uint32_t> frames(1 << 16);
        for (size_t at = 0; at < frames.size(); at += 2) frames[at] = type;
        while (!over) {
          const int socket = connect_to(hosts.port);
          if (socket < 0) usleep(1000);
          while (socket >= 0 && !over && send(socket, frames.data(), frames.size() * 4, MSG_NOSIGNAL) > 0) {
          }
          if (socket >= 0) close(socket);
        }
      });
    }
    usleep(100'000);
    const int64_t before = resident_bytes();
    usleep(700'000);
    CHECK(resident_bytes() - before < 8 << 20);
    // The relay's thread still handles its own run: the progress of its ranks arrives.
    the_run_begins(hosts);
    over = true;
    for (std::thread& flooder : flooders) flooder.join();
  }
}

void silent_connections_are_bounded() {
  TwoHosts hosts(false);
  std::vector<int> held;
  const int before = descriptors();
  for (int i = 0; i < 300; ++i) held.push_back(connect_to(hosts.port));
  usleep(300'000);
  // 300 of this test, at most 64 of the relay, and at most one more that the relay is about to drop.
  CHECK(descriptors() - before <= 300 + 64 + 1);
  the_run_begins(hosts);
  // Once all hosts are connected, unauthenticated connections are dropped and the port is closed.
  CHECK(within_seconds(2, [&] { return descriptors() - before <= 300 + 2; }));
  CHECK(connect_to(hosts.port) < 0 && errno == ECONNREFUSED);
  for (const int socket : held) close(socket);
}

/// Whether the relay has accepted the connection and sent its challenge.
bool challenged(int socket) {
  char first = 0;
  return recv(socket, &first, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
}

void accepted_connections_per_poll_are_bounded() {
  TwoHosts hosts(false);
  std::vector<int> held;
  const int64_t began = mimo::monotonic_nanoseconds();
  for (int i = 0; i < 300; ++i) held.push_back(connect_to(hosts.port));
  usleep(20'000);
  const int64_t accepted = std::count_if(held.begin(), held.end(), challenged);
  const int64_t polls = (mimo::monotonic_nanoseconds() - began) / 5'000'000 + 1;
  // 64 places, a further poll that accepts 16, and then 4 every 5 ms.
  CHECK(accepted >= 64 && accepted <= 64 + 16 + 4 * polls);
  the_run_begins(hosts);
  for (const int socket : held) close(socket);
}

void a_slow_connection_is_closed() {
  TwoHosts hosts(false);
  const int slow = connect_to(hosts.port);
  const uint32_t head[2] = {static_cast<uint32_t>(MessageType::response), sizeof(mimo::Response)};
  CHECK(send(slow, head, sizeof(head), MSG_NOSIGNAL) == sizeof(head));
  // The whole body would take 68 of these single bytes.
  const int64_t began = mimo::monotonic_nanoseconds();
  char skipped[64];
  CHECK(recv(slow, skipped, sizeof(skipped), 0) == 40);
  int sent = 0;
  for (; sent < 67 && !ended(slow); ++sent) {
    if (send(slow, "x", 1, MSG_NOSIGNAL) != 1) break;
    usleep(100'000);
  }
  CHECK(sent < 60);
  CHECK(mimo::monotonic_nanoseconds() - began > 4'000'000'000);
  close(slow);
  the_run_begins(hosts);
}

/// A wrong key, a repeated proof of another connection, and host indices that are no child of host 0.
void wrong_proofs_are_refused() {
  TwoHosts hosts(false);
  const uint8_t wrong[32] = {9};
  bool refused = false;
  try {
    mimo::connect_to_parent(*hosts.of[2], "127.0.0.1", hosts.port, wrong);
  } catch (const mimo::Error& error) {
    refused = std::strstr(error.what(), "another key") != nullptr;
  }
  CHECK(refused);
  for (const int32_t index : {1, 0, 2, -1}) {
    const int socket = connect_to(hosts.port);
    mimo::Handshake seen{};
    seen.host_index = index;
    struct {
      uint32_t head[2] = {static_cast<uint32_t>(MessageType::response), sizeof(mimo::Response)};
      mimo::Response response;
    } message;
    // A proof with the right key, but for a nonce of another connection.
    message.response = {index, seen.child_nonce, mimo::make_proof(key, mimo::Side::child, seen)};
    CHECK(send(socket, &message, sizeof(message), MSG_NOSIGNAL) == sizeof(message));
    CHECK(within_seconds(2, [&] { return ended(socket); }));
    close(socket);
  }
  CHECK(hosts.of[0]->region(3).pid == 0);
  the_run_begins(hosts);
}

/// A process at the parent's address that does not know the key is refused.
void a_false_parent_is_refused() {
  TwoHosts hosts(false);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(at);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0 && listen(listener, 4) == 0);
  CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&at), &length) == 0);
  std::thread parent([&] {
    mimo::Link link(accept(listener, nullptr, nullptr));
    link.send(MessageType::challenge, mimo::Nonce{{7}});
    link.send(MessageType::accepted, mimo::Proof{{8}});
    link.flush();
    usleep(500'000);
  });
  bool refused = false;
  try {
    mimo::connect_to_parent(*hosts.of[2], "127.0.0.1", ntohs(at.sin_port), key);
  } catch (const mimo::Error& error) {
    refused = std::strstr(error.what(), "does not prove") != nullptr;
  }
  CHECK(refused);
  parent.join();
  close(listener);
}

/// A host that authenticates and then sends a message without a valid tag.
void a_wrong_tag_fails_the_run_with_the_reason() {
  TwoHosts hosts(false);
  mimo::Link link(connect_to(hosts.port));
  MessageType type;
  CHECK(within_seconds(2, [&] { link.receive(); return link.next(type); }));
  mimo::Handshake handshake{link.as<mimo::Nonce>(), {{6}}, 1};
  link.send(MessageType::response, mimo::Response{1, handshake.child_nonce, mimo::make_proof(key, mimo::Side::child, handshake)});
  link.flush();
  CHECK(within_seconds(2, [&] { link.receive(); return link.next(type); }));
  CHECK(type == MessageType::accepted);
  struct {
    uint32_t head[2] = {static_cast<uint32_t>(MessageType::failure), sizeof(mimo::Failure)};
    mimo::Failure failure{3, "the end"};
    uint8_t tag[32] = {};
  } message;
  static_assert(sizeof(message) == 8 + sizeof(mimo::Failure) + 32);
  CHECK(send(link.socket(), &message, sizeof(message), MSG_NOSIGNAL) == sizeof(message));
  CHECK(within_seconds(2, [&] { return hosts.of[0]->failed(); }));
  CHECK(hosts.of[0]->header().failed_rank == 2);
  CHECK(std::strstr(hosts.of[0]->header().reason, "(failure) was altered, repeated or left out") != nullptr);
  hosts.of[2]->fail(-1, "the end");
}

}  // namespace

int main() {
  a_flood_fills_nothing();
  silent_connections_are_bounded();
  accepted_connections_per_poll_are_bounded();
  a_slow_connection_is_closed();
  wrong_proofs_are_refused();
  a_false_parent_is_refused();
  a_wrong_tag_fails_the_run_with_the_reason();
  return failures == 0 ? 0 : 1;
}
