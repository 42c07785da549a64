// A connection between the relays of two hosts. It never blocks its thread, reads a bounded amount at a time, and takes only
// messages that have the size of their word.
//
// First both sides prove that they know the run's key: the parent sends a nonce (greeting), the child its own nonce and a proof
// (hello), the parent a proof (welcome). Each is an HMAC of both nonces and the host's index. From then on every message
// carries a tag: an HMAC, under a key of this connection and direction, of how many messages came before it, its word, its
// length and its body. So a message that is altered, left out, repeated or sent back closes the connection.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "relay_words.h"

namespace mimo {

/// Data that both sides of a connection sign.
struct Introduction {
  Nonce parent, child;
  int32_t host_index;  // of the child
};

enum class Side { parent, child };

/// The proof of `side` that it knows `key` (32 bytes).
Proof prove(const uint8_t* key, Side side, const Introduction& introduction);

/// A connected socket, with the bytes still to be sent and the bytes received.
class Link {
 public:
  explicit Link(int socket);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int socket() const { return socket_; }
  /// Ended by the other side, or by this one for the fault that `fault()` names.
  bool closed() const { return closed_; }
  const std::string& fault() const { return fault_; }
  bool has_unsent() const { return sent_ < out_.size(); }
  /// Both sides have proved themselves: messages carry tags from now on. `own`: the side of this process.
  void trust(const uint8_t* key, Side own, const Introduction& introduction);

  template <class Body>
  void say(Word word, const Body& body) {
    append(word, &body, sizeof(Body));
  }
  void say(Word word) { append(word, nullptr, 0); }
  /// Sends as many bytes as it can without waiting.
  void send();
  /// Receives without waiting, at most so much that other connections get their turn.
  void receive();
  /// Takes the next message if it has come whole.
  bool next(Word& word);
  /// Its body, which is that of its word.
  template <class Body>
  const Body& as() const {
    return *reinterpret_cast<const Body*>(body_.data());
  }
  /// Messages since trust(), by this side and by the other.
  int64_t said() const { return static_cast<int64_t>(sending_.messages); }
  int64_t heard() const { return static_cast<int64_t>(receiving_.messages); }
  /// Ends the connection for this fault.
  void close_for(const std::string& fault);

 private:
  /// A direction of the connection.
  struct Direction {
    uint8_t key[hmac_key_bytes];
    uint64_t messages = 0;
  };
  void append(Word word, const void* body, size_t bytes);

  int socket_;
  bool closed_ = false, trusted_ = false;
  std::string fault_;
  Direction sending_, receiving_;
  std::vector<uint8_t> out_, in_, body_;
  size_t sent_ = 0, taken_ = 0;
};

}  // namespace mimo
