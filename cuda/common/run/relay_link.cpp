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

struct MessageHeader {
  MessageType type;
  uint32_t body_bytes;
};

/// Sizes of the receive buffer after the handshake and before it.
constexpr size_t authenticated_buffer = size_t{64} << 10;
constexpr size_t handshake_buffer = sizeof(MessageHeader) + longest_body(true);
static_assert(sizeof(MessageHeader) + longest_body(false) + hmac_tag_bytes <= authenticated_buffer);
/// Closes a connection whose other side reads nothing. All messages after a failure of 8192 ranks are 26 MB.
constexpr size_t longest_unsent = size_t{64} << 20;

/// HMAC of `purpose` and the values of the handshake under `key`; 32 bytes.
void derive(const uint8_t* key, const char* purpose, const Handshake& handshake, uint8_t* derived) {
  Hmac hmac(key);
  // The terminating zero keeps a purpose from being the prefix of another.
  hmac.add(purpose, std::strlen(purpose) + 1);
  hmac.add(&handshake.host_index, sizeof(handshake.host_index));
  hmac.add(&handshake.parent_nonce, sizeof(handshake.parent_nonce));
  hmac.add(&handshake.child_nonce, sizeof(handshake.child_nonce));
  hmac.finish(derived);
}

void make_tag(const uint8_t* key, uint64_t sequence, const MessageHeader& header, const uint8_t* body, uint8_t* tag) {
  Hmac hmac(key);
  hmac.add(&sequence, sizeof(sequence));
  hmac.add(&header, sizeof(header));
  hmac.add(body, header.body_bytes);
  hmac.finish(tag);
}

template <class Body>
void terminate_strings(Body&) {}
void terminate_strings(RankIdentity& identity) {
  end_inside(identity.host);
  end_inside(identity.module);
  end_inside(identity.coordinates);
}
void terminate_strings(Failure& failure) { end_inside(failure.reason); }
void terminate_strings(RankState& state) {
  end_inside(state.error);
  for (mimo_call_record& record : state.records) end_inside(record.group);
}

}  // namespace

void terminate_strings(MessageType type, void* body) {
  switch (type) {
#define MIMO_MESSAGE(name, Body, handshake)             \
  case MessageType::name:                               \
    terminate_strings(*reinterpret_cast<Body*>(body)); \
    break;
    MIMO_RELAY_MESSAGES(MIMO_MESSAGE)
#undef MIMO_MESSAGE
  }
}

Proof make_proof(const uint8_t* key, Side side, const Handshake& handshake) {
  Proof proof;
  derive(key, side == Side::parent ? "parent proves" : "child proves", handshake, proof.bytes);
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

void Link::set_authenticated(const uint8_t* key, Side own, const Handshake& handshake) {
  derive(key, "parent says", handshake, (own == Side::parent ? sending_ : receiving_).key);
  derive(key, "child says", handshake, (own == Side::parent ? receiving_ : sending_).key);
  authenticated_ = true;
}

void Link::close_with_fault(const std::string& fault) {
  if (closed_) return;
  closed_ = true;
  fault_ = fault;
  // A refusal is still sent, and the shutdown informs the other side at once.
  flush();
  shutdown(socket_, SHUT_RDWR);
  out_.clear();
  sent_ = 0;
}

void Link::append(MessageType type, const void* body, size_t bytes) {
  if (closed_) return;
  const MessageHeader header{type, static_cast<uint32_t>(bytes)};
  const auto* at = reinterpret_cast<const uint8_t*>(&header);
  const auto* from = static_cast<const uint8_t*>(body);
  out_.insert(out_.end(), at, at + sizeof(header));
  if (bytes > 0) out_.insert(out_.end(), from, from + bytes);
  if (authenticated_) {
    uint8_t tag[hmac_tag_bytes];
    make_tag(sending_.key, sending_.messages++, header, from, tag);
    out_.insert(out_.end(), tag, tag + sizeof(tag));
  }
  if (out_.size() - sent_ > longest_unsent) close_with_fault("it does not receive the messages that are sent to it");
}

void Link::flush() {
  while (has_unsent()) {
    const ssize_t count = ::send(socket_, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (count > 0) {
      sent_ += static_cast<size_t>(count);
    } else if (errno != EINTR) {
      // After an error nothing more can be sent, but messages that the other side sent before it closed are still received.
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
  in_.erase(in_.begin(), in_.begin() + static_cast<ptrdiff_t>(consumed_));
  consumed_ = 0;
  // The longest message fits into the buffer, so a full buffer holds at least one that next() takes.
  const size_t capacity = authenticated_ ? authenticated_buffer : handshake_buffer;
  if (closed_ || in_.size() >= capacity) return;
  const size_t held = in_.size();
  in_.resize(capacity);
  ssize_t count;
  do count = recv(socket_, in_.data() + held, capacity - held, 0);
  while (count < 0 && errno == EINTR);
  if (count == 0 || (count < 0 && errno != EAGAIN)) closed_ = true;
  in_.resize(held + static_cast<size_t>(std::max<ssize_t>(count, 0)));
}

bool Link::next(MessageType& type) {
  if (!fault_.empty()) return false;
  MessageHeader header;
  const size_t left = in_.size() - consumed_;
  if (left < sizeof(header)) return false;
  const uint8_t* at = in_.data() + consumed_;
  std::memcpy(&header, at, sizeof(header));
  const auto index = static_cast<size_t>(header.type);
  if (index >= message_types || message_formats[index].handshake == authenticated_ ||
      header.body_bytes != message_formats[index].body_bytes) {
    close_with_fault("it sent bytes that are no message of this protocol");
    return false;
  }
  const size_t bytes = sizeof(header) + header.body_bytes + (authenticated_ ? hmac_tag_bytes : 0);
  if (left < bytes) return false;
  const uint8_t* body = at + sizeof(header);
  if (authenticated_) {
    uint8_t expected[hmac_tag_bytes];
    make_tag(receiving_.key, receiving_.messages++, header, body, expected);
    if (!equal_in_constant_time(expected, body + header.body_bytes, hmac_tag_bytes)) {
      close_with_fault("a message (" + std::string(message_formats[index].name) +
                       ") was altered, repeated or left out on its way: its tag is wrong");
      return false;
    }
  }
  body_.assign(body, body + header.body_bytes);
  if (header.body_bytes > 0) terminate_strings(header.type, body_.data());
  consumed_ += bytes;
  type = header.type;
  return true;
}

}  // namespace mimo
