// Messages between relays: one that was altered, repeated, sent back, left out or is too long ends the connection, and
// strings that come without an end get one.
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
using mimo::Word;

const uint8_t key[32] = {1, 2, 3};
const mimo::Introduction introduction{{{4}}, {{5}}, 1};

std::vector<uint8_t> waiting_at(int socket) {
  std::vector<uint8_t> bytes(1 << 16);
  const ssize_t count = recv(socket, bytes.data(), bytes.size(), MSG_PEEK | MSG_DONTWAIT);
  bytes.resize(static_cast<size_t>(count > 0 ? count : 0));
  return bytes;
}

/// The two ends of a connection on which both sides have proved themselves.
struct Connection {
  int sockets[2];
  Link *parent, *child;
  Connection() {
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    parent = new Link(sockets[0]);
    child = new Link(sockets[1]);
    parent->trust(key, Side::parent, introduction);
    child->trust(key, Side::child, introduction);
  }
  ~Connection() {
    delete parent;
    delete child;
  }
  /// Messages of `link`, taken off the wire.
  std::vector<uint8_t> said(Link& link) {
    const int far = &link == parent ? sockets[1] : sockets[0];
    link.send();
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

mimo::Outlook outlook(int32_t joined) { return {joined, 1, 2, 3, 4, 5}; }

bool refuses(Link& link, const char* why) {
  Word word;
  return !link.next(word) && link.closed() && link.fault().find(why) != std::string::npos;
}

void messages_arrive() {
  Connection pair;
  for (int32_t rank = 0; rank < 100; ++rank) pair.child->say(Word::outlook, outlook(rank));
  pair.child->say(Word::bye);
  pair.put(*pair.parent, pair.said(*pair.child));
  Word word;
  for (int32_t rank = 0; rank < 100; ++rank) {
    CHECK(pair.parent->next(word) && word == Word::outlook && pair.parent->as<mimo::Outlook>().joined == rank);
  }
  CHECK(pair.parent->next(word) && word == Word::bye);
  CHECK(!pair.parent->next(word) && !pair.parent->closed());
}

/// Every byte of a message counts: its word, its length, its body, its tag.
void an_altered_message_is_refused() {
  const size_t bytes = 8 + sizeof(mimo::Outlook) + mimo::hmac_tag_bytes;
  for (size_t at = 0; at < bytes; ++at) {
    Connection pair;
    pair.child->say(Word::outlook, outlook(2));
    std::vector<uint8_t> message = pair.said(*pair.child);
    CHECK(message.size() == bytes);
    message[at] ^= 1;
    pair.put(*pair.parent, message);
    CHECK(refuses(*pair.parent, at < 8 ? "" : "its tag is wrong"));
  }
}

void a_repeated_message_is_refused() {
  Connection pair;
  pair.child->say(Word::outlook, outlook(2));
  const std::vector<uint8_t> message = pair.said(*pair.child);
  Word word;
  pair.put(*pair.parent, message);
  CHECK(pair.parent->next(word));
  pair.put(*pair.parent, message);
  CHECK(refuses(*pair.parent, "altered, repeated or left out"));
}

void a_message_that_is_sent_back_is_refused() {
  Connection pair;
  pair.child->say(Word::bye);
  pair.put(*pair.child, pair.said(*pair.child));
  CHECK(refuses(*pair.child, "its tag is wrong"));
}

void a_missing_message_is_noticed() {
  Connection pair;
  pair.child->say(Word::outlook, outlook(2));
  pair.said(*pair.child);
  pair.child->say(Word::outlook, outlook(3));
  pair.put(*pair.parent, pair.said(*pair.child));
  CHECK(refuses(*pair.parent, "left out"));
}

void a_message_of_another_connection_is_refused() {
  Connection pair, later;
  mimo::Introduction renewed = introduction;
  renewed.parent.bytes[31] = 1;
  later.parent->trust(key, Side::parent, renewed);
  pair.child->say(Word::bye);
  later.put(*later.parent, pair.said(*pair.child));
  CHECK(refuses(*later.parent, "its tag is wrong"));
}

void a_wrong_length_is_refused_before_the_body() {
  for (const uint32_t bytes : {0xffffffffu, 1u << 20, static_cast<uint32_t>(sizeof(mimo::Outlook)) + 1, 0u}) {
    Connection pair;
    std::vector<uint8_t> head(8);
    const Word word = Word::outlook;
    std::memcpy(head.data(), &word, 4);
    std::memcpy(head.data() + 4, &bytes, 4);
    pair.put(*pair.parent, head);
    CHECK(refuses(*pair.parent, "no message of this protocol"));
  }
}

/// A trusted link takes no second introduction, and an untrusted one takes nothing else.
void words_have_their_time() {
  Connection pair;
  std::vector<uint8_t> hello(8 + sizeof(mimo::Hello));
  const uint32_t head[2] = {static_cast<uint32_t>(Word::hello), sizeof(mimo::Hello)};
  std::memcpy(hello.data(), head, sizeof(head));
  pair.put(*pair.parent, hello);
  CHECK(refuses(*pair.parent, "no message of this protocol"));
  int sockets[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  Link stranger(sockets[0]);
  const uint32_t bye[2] = {static_cast<uint32_t>(Word::bye), 0};
  CHECK(send(sockets[1], bye, sizeof(bye), MSG_NOSIGNAL) == sizeof(bye));
  stranger.receive();
  CHECK(refuses(stranger, "no message of this protocol"));
  close(sockets[1]);
}

void strings_end() {
  Connection pair;
  Failure failure{3, {}};
  std::memset(failure.reason, 'x', sizeof(failure.reason));
  mimo::Name name{3, 4, {}, {}, {}};
  std::memset(name.host, 'x', sizeof(name.host));
  std::memset(name.module, 'x', sizeof(name.module));
  std::memset(name.coordinates, 'x', sizeof(name.coordinates));
  mimo::Whereabouts told{};
  std::memset(told.error, 'x', sizeof(told.error));
  for (mimo_call_record& record : told.records) std::memset(record.group, 'x', sizeof(record.group));
  pair.child->say(Word::failure, failure);
  pair.child->say(Word::name, name);
  pair.child->say(Word::region, told);
  pair.put(*pair.parent, pair.said(*pair.child));
  Word word;
  CHECK(pair.parent->next(word) && word == Word::failure);
  CHECK(strnlen(pair.parent->as<Failure>().reason, 512) == 511);
  CHECK(pair.parent->next(word) && word == Word::name);
  const mimo::Name& named = pair.parent->as<mimo::Name>();
  CHECK(strnlen(named.host, 64) == 63 && strnlen(named.module, 32) == 31 && strnlen(named.coordinates, 64) == 63);
  CHECK(pair.parent->next(word) && word == Word::region);
  const mimo::Whereabouts& where = pair.parent->as<mimo::Whereabouts>();
  CHECK(strnlen(where.error, 512) == 511);
  for (const mimo_call_record& record : where.records) CHECK(strnlen(record.group, 64) == 63);
}

/// However much waits, a turn takes in a bounded part of it: the thread of a relay serves others too.
void a_turn_is_bounded() {
  Connection pair;
  const int size = 4 << 20;
  setsockopt(pair.sockets[1], SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
  for (int32_t i = 0; i < 5000; ++i) pair.child->say(Word::outlook, outlook(i));
  int turns = 0, taken = 0;
  for (; taken < 5000 && turns < 1000; ++turns) {
    pair.child->send();
    pair.parent->receive();
    Word word;
    int now = 0;
    while (pair.parent->next(word)) ++now;
    CHECK(now <= (64 << 10) / static_cast<int>(8 + sizeof(mimo::Outlook) + mimo::hmac_tag_bytes));
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
  words_have_their_time();
  strings_end();
  a_turn_is_bounded();
  return failures == 0 ? 0 : 1;
}
