#include "relay_link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "sha256.h"

namespace mimo {
namespace {

struct Head {
  Word word;
  uint32_t bytes;
};
constexpr size_t largest_body = sizeof(Whereabouts);

}  // namespace

Link::Link(int socket) : socket_(socket) {
  const int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
}

Link::~Link() {
  if (socket_ >= 0) close(socket_);
}

void Link::append(Word word, const void* body, size_t bytes) {
  const Head head{word, static_cast<uint32_t>(bytes)};
  const auto* at = reinterpret_cast<const char*>(&head);
  out_.insert(out_.end(), at, at + sizeof(head));
  const auto* from = static_cast<const char*>(body);
  if (bytes > 0) out_.insert(out_.end(), from, from + bytes);
}

void Link::exchange() {
  while (!closed_ && has_unsent()) {
    const ssize_t count = send(socket_, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
    if (count > 0) {
      sent_ += static_cast<size_t>(count);
    } else if (errno != EINTR) {
      // What the other side said before it went is still read.
      if (errno != EAGAIN) out_.clear(), sent_ = 0;
      break;
    }
  }
  if (!has_unsent()) {
    out_.clear();
    sent_ = 0;
  }
  in_.erase(in_.begin(), in_.begin() + static_cast<ptrdiff_t>(taken_));
  taken_ = 0;
  char part[16384];
  while (!closed_) {
    const ssize_t count = recv(socket_, part, sizeof(part), 0);
    if (count > 0) {
      in_.insert(in_.end(), part, part + count);
    } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
      closed_ = true;
    } else if (errno == EAGAIN) {
      break;
    }
  }
}

bool Link::next(Word& word) {
  Head head;
  const size_t left = in_.size() - taken_;
  if (left < sizeof(head)) return false;
  std::memcpy(&head, in_.data() + taken_, sizeof(head));
  if (head.bytes > largest_body) {
    closed_ = true;
    taken_ = in_.size();
    return false;
  }
  if (left < sizeof(head) + head.bytes) return false;
  const char* body = in_.data() + taken_ + sizeof(head);
  body_.assign(body, body + head.bytes);
  taken_ += sizeof(head) + head.bytes;
  word = head.word;
  return true;
}

void prove(const uint8_t* key, const Nonce& nonce, int32_t host_index, uint8_t* proof) {
  // One block of key and nonce, then the index and the key once more: who sees proofs cannot prolong them.
  uint8_t block[sha256_block];
  std::memcpy(block, key, 32);
  std::memcpy(block + 32, nonce.bytes, 32);
  Sha256State state = sha256_begin();
  Sha256State* states[1] = {&state};
  const uint8_t* blocks[1] = {block};
  sha256_update(states, blocks, 1, 1);
  uint8_t rest[36];
  std::memcpy(rest, &host_index, 4);
  std::memcpy(rest + 4, key, 32);
  sha256_end(state, rest, sizeof(rest), sizeof(block) + sizeof(rest), proof);
}

}  // namespace mimo
