#include "relay_link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace mimo {
namespace {

struct Head {
  Word word;
  uint32_t bytes;
};

/// Read in one turn, and kept until it is taken, of a side that has proved itself and of one that has not.
constexpr size_t trusted_room = size_t{64} << 10;
constexpr size_t stranger_room = sizeof(Head) + longest_body(true);
static_assert(sizeof(Head) + longest_body(false) + hmac_tag_bytes <= trusted_room);
/// The other side reads, if slowly, or is given up: all that can be said of 8192 ranks after a failure is 26 MB.
constexpr size_t longest_unsent = size_t{64} << 20;

/// A tag that only a side that knows `key` can make for `purpose` on this connection; 32 bytes.
void derive(const uint8_t* key, const char* purpose, const Introduction& introduction, uint8_t* derived) {
  Hmac hmac(key);
  // With its zero: no purpose is the beginning of another.
  hmac.add(purpose, std::strlen(purpose) + 1);
  hmac.add(&introduction.host_index, sizeof(introduction.host_index));
  hmac.add(&introduction.parent, sizeof(introduction.parent));
  hmac.add(&introduction.child, sizeof(introduction.child));
  hmac.finish(derived);
}

void make_tag(const uint8_t* key, uint64_t number, const Head& head, const uint8_t* body, uint8_t* tag) {
  Hmac hmac(key);
  hmac.add(&number, sizeof(number));
  hmac.add(&head, sizeof(head));
  hmac.add(body, head.bytes);
  hmac.finish(tag);
}

template <class Body>
void terminate_strings(Body&) {}
void terminate_strings(Name& name) {
  end_inside(name.host);
  end_inside(name.module);
  end_inside(name.coordinates);
}
void terminate_strings(Failure& failure) { end_inside(failure.reason); }
void terminate_strings(Whereabouts& told) {
  end_inside(told.error);
  for (mimo_call_record& record : told.records) end_inside(record.group);
}

}  // namespace

void terminate(Word word, void* body) {
  switch (word) {
#define MIMO_WORD(word, type, proving)                \
  case Word::word:                                    \
    terminate_strings(*reinterpret_cast<type*>(body)); \
    break;
    MIMO_RELAY_WORDS(MIMO_WORD)
#undef MIMO_WORD
  }
}

Proof prove(const uint8_t* key, Side side, const Introduction& introduction) {
  Proof proof;
  derive(key, side == Side::parent ? "parent proves" : "child proves", introduction, proof.bytes);
  return proof;
}

Link::Link(int socket) : socket_(socket) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
}

Link::~Link() {
  if (socket_ >= 0) close(socket_);
}

void Link::trust(const uint8_t* key, Side own, const Introduction& introduction) {
  derive(key, "parent says", introduction, (own == Side::parent ? sending_ : receiving_).key);
  derive(key, "child says", introduction, (own == Side::parent ? receiving_ : sending_).key);
  trusted_ = true;
}

void Link::close_for(const std::string& fault) {
  if (closed_) return;
  closed_ = true;
  fault_ = fault;
  // A refusal is still sent, and the shutdown tells the other side at once.
  send();
  shutdown(socket_, SHUT_RDWR);
  out_.clear();
  sent_ = 0;
}

void Link::append(Word word, const void* body, size_t bytes) {
  if (closed_) return;
  const Head head{word, static_cast<uint32_t>(bytes)};
  const auto* at = reinterpret_cast<const uint8_t*>(&head);
  const auto* from = static_cast<const uint8_t*>(body);
  out_.insert(out_.end(), at, at + sizeof(head));
  if (bytes > 0) out_.insert(out_.end(), from, from + bytes);
  if (trusted_) {
    uint8_t tag[hmac_tag_bytes];
    make_tag(sending_.key, sending_.messages++, head, from, tag);
    out_.insert(out_.end(), tag, tag + sizeof(tag));
  }
  if (out_.size() - sent_ > longest_unsent) close_for("it does not take what it is told");
}

void Link::send() {
  while (has_unsent()) {
    const ssize_t count = ::send(socket_, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (count > 0) {
      sent_ += static_cast<size_t>(count);
    } else if (errno != EINTR) {
      // Messages that the other side sent before it went are still read.
      if (errno != EAGAIN) out_.clear(), sent_ = 0;
      break;
    }
  }
  if (!has_unsent()) {
    out_.clear();
    sent_ = 0;
  }
}

void Link::receive() {
  in_.erase(in_.begin(), in_.begin() + static_cast<ptrdiff_t>(taken_));
  taken_ = 0;
  // A whole message fits, so a full buffer is emptied before the next turn.
  const size_t room = trusted_ ? trusted_room : stranger_room;
  if (closed_ || in_.size() >= room) return;
  const size_t held = in_.size();
  in_.resize(room);
  ssize_t count;
  do count = recv(socket_, in_.data() + held, room - held, 0);
  while (count < 0 && errno == EINTR);
  if (count == 0 || (count < 0 && errno != EAGAIN)) closed_ = true;
  in_.resize(held + static_cast<size_t>(std::max<ssize_t>(count, 0)));
}

bool Link::next(Word& word) {
  if (!fault_.empty()) return false;
  Head head;
  const size_t left = in_.size() - taken_;
  if (left < sizeof(head)) return false;
  const uint8_t* at = in_.data() + taken_;
  std::memcpy(&head, at, sizeof(head));
  const auto index = static_cast<size_t>(head.word);
  if (index >= word_count || word_shapes[index].proving == trusted_ || head.bytes != word_shapes[index].bytes) {
    close_for("it sent what is no message of this protocol");
    return false;
  }
  const size_t bytes = sizeof(head) + head.bytes + (trusted_ ? hmac_tag_bytes : 0);
  if (left < bytes) return false;
  const uint8_t* body = at + sizeof(head);
  if (trusted_) {
    uint8_t expected[hmac_tag_bytes];
    make_tag(receiving_.key, receiving_.messages++, head, body, expected);
    if (!equal_in_constant_time(expected, body + head.bytes, hmac_tag_bytes)) {
      close_for("a message (" + std::string(word_shapes[index].name) +
                ") was altered, repeated or left out on its way: its tag is wrong");
      return false;
    }
  }
  body_.assign(body, body + head.bytes);
  if (head.bytes > 0) terminate(head.word, body_.data());
  taken_ += bytes;
  word = head.word;
  return true;
}

}  // namespace mimo
