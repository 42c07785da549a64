// Messages between the relays of two hosts: a connection that never blocks its thread, and what is said on it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "run.h"

namespace mimo {

enum class Word : uint32_t {
  greeting,  // Nonce, by the centre
  hello,     // Hello, by the other
  beat,      // Beat of a rank of the sender's host
  name,      // Name of a rank
  posting,   // Posting
  failure,   // Failure: the first wins
  region,    // Whereabouts of a rank when the run had failed
  gathered,  // by the centre: it has sent all whereabouts
  noted,     // by the others: these were their ranks' last
  bye,       // all ranks of the sender's host have finished
};

struct Nonce {
  uint8_t bytes[32];
};
struct Hello {
  int32_t host_index;
  uint8_t proof[32];
};
struct Beat {
  int32_t rank, phase;
  int64_t heartbeat, progress, progress_age, step, calls, waiting_call;
};
struct Name {
  int32_t rank, pid;
  char host[64], module[32], coordinates[64];
};
struct Failure {
  int32_t rank;
  char reason[512];
};
/// What is told of the calls of a rank: the latest of each group, and those that are not done.
constexpr int32_t told_calls = 24;
struct Whereabouts {
  int32_t rank, phase, count;
  int64_t step, calls, waiting_call;
  char error[512];
  mimo_call_record records[told_calls];
};

/// A connected socket with what is still to be sent and what has come.
class Link {
 public:
  explicit Link(int socket);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int socket() const { return socket_; }
  /// The other side has gone, or said something that is no message.
  bool closed() const { return closed_; }
  bool has_unsent() const { return sent_ < out_.size(); }

  template <class Body>
  void say(Word word, const Body& body) {
    append(word, &body, sizeof(Body));
  }
  void say(Word word) { append(word, nullptr, 0); }
  /// Sends and receives what can be without waiting.
  void exchange();
  /// Takes the next message if it has come whole; its body is `bytes()`.
  bool next(Word& word);
  const std::vector<char>& bytes() const { return body_; }
  /// The body, or null when it has another size.
  template <class Body>
  const Body* as() const {
    return body_.size() == sizeof(Body) ? reinterpret_cast<const Body*>(body_.data()) : nullptr;
  }

 private:
  void append(Word word, const void* body, size_t bytes);
  int socket_;
  bool closed_ = false;
  std::vector<char> out_, in_, body_;
  size_t sent_ = 0, taken_ = 0;
};

/// What proves that one knows the key: a hash of key, nonce and host.
void prove(const uint8_t* key, const Nonce& nonce, int32_t host_index, uint8_t* proof);

}  // namespace mimo
