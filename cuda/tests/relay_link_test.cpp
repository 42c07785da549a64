// Messages between relays: a message that was altered, repeated, sent back, left out or is too long closes the connection, and
// unterminated strings are terminated.
#include "relay_link.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "check.h"

namespace {

using mimo::Failure;
using mimo::Link;
using mimo::Side;
using mimo::MessageType;

const uint8_t key[32] = {1, 2, 3};
const mimo::Handshake handshake{{{4}}, {{5}}, 1};

std::vector<uint8_t> waiting_at(int socket) {
  std::vector<uint8_t> bytes(1 << 16);
  const ssize_t count = recv(socket, bytes.data(), bytes.size(), MSG_PEEK | MSG_DONTWAIT);
  bytes.resize(static_cast<size_t>(count > 0 ? count : 0));
  return bytes;
}

/// Both ends of an authenticated connection.
struct Connection {
  int sockets[2];
  Link *parent, *child;
  Connection() {
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    parent = new Link(sockets[0]);
    child = new Link(sockets[1]);
    parent->set_authenticated(key, Side::parent, handshake);
    child->set_authenticated(key, Side::child, handshake);
  }
  ~Connection() {
    delete parent;
    delete child;
  }
  /// The bytes that `link` sends, removed from the socket.
  std::vector<uint8_t> take_sent(Link& link) {
    const int far = &link == parent ? sockets[1] : sockets[0];
    link.flush();
    std::vector<uint8_t> bytes = waiting_at(far);
    std::vector<uint8_t> gone(bytes.size());
    CHECK(recv(far, gone.data(), gone.size(), MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size()));
    return bytes;
  }
  void put(Link& to, const std::vector<uint8_t>& bytes) {
    const int from = &to == parent ? sockets[1] : sockets[0];
    CHECK(send(from, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    to.receive();
  }
};

mimo::ProgressSummary summary(int32_t joined) { return {joined, 1, 2, 3, 4, 5}; }

bool refuses(Link& link, const char* why) {
  MessageType type;
  return !link.next(type) && link.closed() && link.fault().find(why) != std::string::npos;
}

void messages_arrive() {
  Connection pair;
  for (int32_t rank = 0; rank < 100; ++rank) pair.child->send(MessageType::progress, summary(rank));
  pair.child->send(MessageType::finished);
  pair.put(*pair.parent, pair.take_sent(*pair.child));
  MessageType type;
  for (int32_t rank = 0; rank < 100; ++rank) {
    CHECK(pair.parent->next(type) && type == MessageType::progress);
    CHECK(pair.parent->as<mimo::ProgressSummary>().joined == rank);
  }
  CHECK(pair.parent->next(type) && type == MessageType::finished);
  CHECK(!pair.parent->next(type) && !pair.parent->closed());
}

/// Every byte of a message is protected: type, length, body and tag.
void an_altered_message_is_refused() {
  const size_t bytes = 8 + sizeof(mimo::ProgressSummary) + mimo::hmac_tag_bytes;
  for (size_t at = 0; at < bytes; ++at) {
    Connection pair;
    pair.child->send(MessageType::progress, summary(2));
    std::vector<uint8_t> message = pair.take_sent(*pair.child);
    CHECK(message.size() == bytes);
    message[at] ^= 1;
    pair.put(*pair.parent, message);
    CHECK(refuses(*pair.parent, at < 8 ? "" : "its tag is wrong"));
  }
}

void a_repeated_message_is_refused() {
  Connection pair;
  pair.child->send(MessageType::progress, summary(2));
  const std::vector<uint8_t> message = pair.take_sent(*pair.child);
  MessageType type;
  pair.put(*pair.parent, message);
  CHECK(pair.parent->next(type));
  pair.put(*pair.parent, message);
  CHECK(refuses(*pair.parent, "altered, repeated or left out"));
}

void a_message_that_is_sent_back_is_refused() {
  Connection pair;
  pair.child->send(MessageType::finished);
  pair.put(*pair.child, pair.take_sent(*pair.child));
  CHECK(refuses(*pair.child, "its tag is wrong"));
}

void a_missing_message_is_noticed() {
  Connection pair;
  pair.child->send(MessageType::progress, summary(2));
  pair.take_sent(*pair.child);
  pair.child->send(MessageType::progress, summary(3));
  pair.put(*pair.parent, pair.take_sent(*pair.child));
  CHECK(refuses(*pair.parent, "left out"));
}

void a_message_of_another_connection_is_refused() {
  Connection pair, later;
  mimo::Handshake renewed = handshake;
  renewed.parent_nonce.bytes[31] = 1;
  later.parent->set_authenticated(key, Side::parent, renewed);
  pair.child->send(MessageType::finished);
  later.put(*later.parent, pair.take_sent(*pair.child));
  CHECK(refuses(*later.parent, "its tag is wrong"));
}

void a_wrong_length_is_refused_before_the_body() {
  for (const uint32_t bytes : {0xffffffffu, 1u << 20, static_cast<uint32_t>(sizeof(mimo::ProgressSummary)) + 1, 0u}) {
    Connection pair;
    std::vector<uint8_t> head(8);
    const MessageType type = MessageType::progress;
    std::memcpy(head.data(), &type, 4);
    std::memcpy(head.data() + 4, &bytes, 4);
    pair.put(*pair.parent, head);
    CHECK(refuses(*pair.parent, "no message of this protocol"));
  }
}

/// After the handshake a link refuses its messages; before, it refuses all others.
void messages_out_of_phase_are_refused() {
  Connection pair;
  std::vector<uint8_t> response(8 + sizeof(mimo::Response));
  const uint32_t head[2] = {static_cast<uint32_t>(MessageType::response), sizeof(mimo::Response)};
  std::memcpy(response.data(), head, sizeof(head));
  pair.put(*pair.parent, response);
  CHECK(refuses(*pair.parent, "no message of this protocol"));
  int sockets[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  Link unauthenticated(sockets[0]);
  const uint32_t finished[2] = {static_cast<uint32_t>(MessageType::finished), 0};
  CHECK(send(sockets[1], finished, sizeof(finished), MSG_NOSIGNAL) == sizeof(finished));
  unauthenticated.receive();
  CHECK(refuses(unauthenticated, "no message of this protocol"));
  close(sockets[1]);
}

void strings_end() {
  Connection pair;
  Failure failure{3, {}};
  std::memset(failure.reason, 'x', sizeof(failure.reason));
  mimo::RankIdentity identity{3, 4, {}, {}, {}};
  std::memset(identity.host, 'x', sizeof(identity.host));
  std::memset(identity.module, 'x', sizeof(identity.module));
  std::memset(identity.coordinates, 'x', sizeof(identity.coordinates));
  mimo::RankState state{};
  std::memset(state.error, 'x', sizeof(state.error));
  for (mimo_call_record& record : state.records) std::memset(record.group, 'x', sizeof(record.group));
  pair.child->send(MessageType::failure, failure);
  pair.child->send(MessageType::identity, identity);
  pair.child->send(MessageType::rank_state, state);
  pair.put(*pair.parent, pair.take_sent(*pair.child));
  MessageType type;
  CHECK(pair.parent->next(type) && type == MessageType::failure);
  CHECK(strnlen(pair.parent->as<Failure>().reason, 512) == 511);
  CHECK(pair.parent->next(type) && type == MessageType::identity);
  const mimo::RankIdentity& received = pair.parent->as<mimo::RankIdentity>();
  CHECK(strnlen(received.host, 64) == 63 && strnlen(received.module, 32) == 31 && strnlen(received.coordinates, 64) == 63);
  CHECK(pair.parent->next(type) && type == MessageType::rank_state);
  const mimo::RankState& state_received = pair.parent->as<mimo::RankState>();
  CHECK(strnlen(state_received.error, 512) == 511);
  for (const mimo_call_record& record : state_received.records) CHECK(strnlen(record.group, 64) == 63);
}

/// A call of receive() reads a bounded number of bytes, however many wait: a relay's thread serves other connections too.
void a_call_of_receive_is_bounded() {
  Connection pair;
  const int size = 4 << 20;
  setsockopt(pair.sockets[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
  for (int32_t i = 0; i < 5000; ++i) pair.child->send(MessageType::progress, summary(i));
  int turns = 0, taken = 0;
  for (; taken < 5000 && turns < 1000; ++turns) {
    pair.child->flush();
    pair.parent->receive();
    MessageType type;
    int now = 0;
    while (pair.parent->next(type)) ++now;
    CHECK(now <= (64 << 10) / static_cast<int>(8 + sizeof(mimo::ProgressSummary) + mimo::hmac_tag_bytes));
    taken += now;
  }
  CHECK(taken == 5000);
}

}  // namespace

int main() {
  messages_arrive();
  an_altered_message_is_refused();
  a_repeated_message_is_refused();
  a_message_that_is_sent_back_is_refused();
  a_missing_message_is_noticed();
  a_message_of_another_connection_is_refused();
  a_wrong_length_is_refused_before_the_body();
  messages_out_of_phase_are_refused();
  strings_end();
  a_call_of_receive_is_bounded();
  return failures == 0 ? 0 : 1;
}
