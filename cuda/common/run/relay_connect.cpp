// Connecting the relays of two hosts: the parent's listening socket, and the child's connection to it.
#include <netdb.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "relay.h"
#include "status.h"

namespace mimo {
namespace {

constexpr int retry_microseconds = 50'000;
constexpr int poll_milliseconds = 20;
/// Connections that wait to be accepted. Under a flood a relay accepts 800 per second: a longer queue would be a longer wait.
constexpr int queue_length = 256;

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses numeric(const std::string& address, int32_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    throw Error(MIMO_ERROR_ARGUMENT, "Relays need a numeric address, not " + address + ".");
  }
  return {found, &freeaddrinfo};
}

[[noreturn]] void fail_system(const std::string& what, int code) {
  throw Error(MIMO_ERROR_PEER, what + ": " + std::strerror(code) + ".");
}

/// An attempt, until `end`, to connect to the parent and to complete the handshake.
class Attempt {
 public:
  Attempt(const uint8_t* key, int32_t host_index, int64_t end) : key_(key), end_(end) {
    handshake_.host_index = host_index;
  }

  /// The authenticated connection; null when the parent has closed it during the handshake, or after `end`. `code`: the system's
  /// error when the parent cannot be reached, or 0.
  std::unique_ptr<Link> make(const addrinfo& at, int& code) {
    code = 0;
    const int opened = socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (opened < 0) {
      code = errno;
      return nullptr;
    }
    link_ = std::make_unique<Link>(opened);
    if (connect(opened, at.ai_addr, at.ai_addrlen) != 0 && errno != EINPROGRESS) code = errno;
    while (code == 0 && !wait_for(POLLOUT)) {
      if (monotonic_nanoseconds() > end_) code = ETIMEDOUT;
    }
    socklen_t length = sizeof(code);
    if (code == 0) getsockopt(opened, SOL_SOCKET, SO_ERROR, &code, &length);
    if (code != 0 || !authenticate()) return nullptr;
    return std::move(link_);
  }

 private:
  bool wait_for(short events) const {
    pollfd waiting{link_->socket(), events, 0};
    return poll(&waiting, 1, poll_milliseconds) > 0;
  }

  /// Waits for the next message until `end`.
  bool receive(MessageType& type) {
    while (!link_->next(type)) {
      if (link_->closed() || monotonic_nanoseconds() > end_) return false;
      wait_for(POLLIN);
      link_->receive();
    }
    return true;
  }

  bool authenticate() {
    MessageType type;
    if (!receive(type) || type != MessageType::challenge) return false;
    handshake_.parent_nonce = link_->as<Nonce>();
    if (getrandom(&handshake_.child_nonce, sizeof(Nonce), 0) != sizeof(Nonce)) return false;
    const Proof proof = make_proof(key_, Side::child, handshake_);
    link_->send(MessageType::response, Response{handshake_.host_index, handshake_.child_nonce, proof});
    link_->flush();
    if (!receive(type)) return false;
    if (type == MessageType::refused) {
      throw Error(MIMO_ERROR_PEER, "The parent host refused this host: it has another key for this run.");
    }
    const Proof expected = make_proof(key_, Side::parent, handshake_);
    if (type != MessageType::accepted ||
        !equal_in_constant_time(expected.bytes, link_->as<Proof>().bytes, sizeof(expected.bytes))) {
      throw Error(MIMO_ERROR_PEER,
                  "The process at the parent host's address does not prove that it belongs to this run: it has another key.");
    }
    link_->set_authenticated(key_, Side::child, handshake_);
    return true;
  }

  const uint8_t* key_;
  const int64_t end_;
  Handshake handshake_{};
  std::unique_ptr<Link> link_;
};

}  // namespace

int listen_for_children(const Run& run, const std::string& address) {
  const RunHeader& header = run.header();
  if (children_of(header.own_host, header.hosts) == 0) return -1;
  const Addresses at = numeric(address, 0);
  const int listener = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener >= 0 && bind(listener, at->ai_addr, at->ai_addrlen) == 0 && listen(listener, queue_length) == 0) return listener;
  const int code = errno;
  if (listener >= 0) close(listener);
  fail_system("This host cannot listen for the hosts below it at " + address, code);
}

std::unique_ptr<Link> connect_to_parent(const Run& run, const std::string& address, int32_t port, const uint8_t* key,
                                        int64_t milliseconds) {
  const int32_t own = run.header().own_host;
  const Addresses at = numeric(address, port);
  const std::string parent = parent_of(own) == 0 ? "The host of rank 0" : "Host " + std::to_string(parent_of(own)) + " of the run";
  const std::string where = address + ":" + std::to_string(port);
  const int64_t began = monotonic_nanoseconds(), end = began + milliseconds * millisecond;
  for (;;) {
    int code = 0;
    // A full accept queue of the parent drops connections, so the attempt is repeated, with more time each for a slow parent.
    const int64_t now = monotonic_nanoseconds();
    Attempt attempt(key, own, std::min(end, now + std::max(1000 * millisecond, (now - began) / 4)));
    if (std::unique_ptr<Link> link = attempt.make(*at, code)) return link;
    // A reset means that the parent has dropped the connection in favour of a later one.
    const bool again = code == 0 || code == ECONNRESET || (code == ETIMEDOUT && monotonic_nanoseconds() <= end);
    if (!again) {
      fail_system(parent + " cannot be reached at " + where + ", where its relay listens", code);
    }
    if (monotonic_nanoseconds() > end) {
      throw Error(MIMO_ERROR_PEER, parent + " did not accept this host at " + where + " within " +
                                       std::to_string(milliseconds / 1000) +
                                       " s: unauthenticated connections keep it busy.");
    }
    usleep(retry_microseconds);
  }
}

}  // namespace mimo
