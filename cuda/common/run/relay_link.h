// A connection between the relays of two hosts. It never blocks its thread and reads a bounded number of bytes per call. A
// message is refused unless it is as long as its type demands.
//
// In the handshake both sides prove by challenge and response that they know the run's key. The parent sends a nonce
// (challenge), the child its own nonce and a proof (response), the parent a proof (accepted). A proof is an HMAC of both nonces
// and the child's host index. Every later message carries a tag: an HMAC of its sequence number, type, length and body, under a
// key of this connection and direction. A message that is altered, left out, repeated or sent back closes the connection.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "relay_messages.h"

namespace mimo {

/// Values that the proofs and keys of a connection depend on.
struct Handshake {
  Nonce parent_nonce, child_nonce;
  int32_t host_index;  // of the child
};

enum class Side { parent, child };

/// The proof of `side` that it knows `key` (32 bytes).
Proof make_proof(const uint8_t* key, Side side, const Handshake& handshake);

/// A connected socket with its send and receive buffers.
class Link {
 public:
  /// Takes over `socket`.
  explicit Link(int socket);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int socket() const { return socket_; }
  /// Closed by the other side, or by this side because of `fault()`.
  bool closed() const { return closed_; }
  const std::string& fault() const { return fault_; }
  bool has_unsent() const { return sent_ < out_.size(); }
  /// The handshake has succeeded: messages carry tags from now on. `own`: the side of this process.
  void set_authenticated(const uint8_t* key, Side own, const Handshake& handshake);

  /// Appends a message to the send buffer.
  template <class Body>
  void send(MessageType type, const Body& body) {
    append(type, &body, sizeof(Body));
  }
  void send(MessageType type) { append(type, nullptr, 0); }
  /// Sends as much of the send buffer as the socket accepts without waiting.
  void flush();
  /// Receives without waiting, at most as much as the receive buffer has room for.
  void receive();
  /// Takes the next message if it has been received completely.
  bool next(MessageType& type);
  /// The body of the message that next() has taken; `Body` is that of its type.
  template <class Body>
  const Body& as() const {
    return *reinterpret_cast<const Body*>(body_.data());
  }
  /// Messages since set_authenticated().
  int64_t messages_sent() const { return static_cast<int64_t>(sending_.messages); }
  int64_t messages_received() const { return static_cast<int64_t>(receiving_.messages); }
  /// Closes the connection, with the reason for fault().
  void close_with_fault(const std::string& fault);

 private:
  struct Direction {
    uint8_t key[hmac_key_bytes];
    uint64_t messages = 0;
  };
  void append(MessageType type, const void* body, size_t bytes);

  int socket_;
  bool closed_ = false, authenticated_ = false;
  std::string fault_;
  Direction sending_, receiving_;
  std::vector<uint8_t> out_, in_, body_;
  size_t sent_ = 0, consumed_ = 0;  // bytes of out_ and in_
};

}  // namespace mimo
