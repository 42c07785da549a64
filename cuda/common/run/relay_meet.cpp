// How the relays of two hosts come to have a connection: the parent's listening socket, and the child's way in.
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
constexpr int look_milliseconds = 20;
/// Connections that wait to be accepted. A relay that strangers keep busy takes 800 a second: a longer queue would be a longer wait.
constexpr int queue_length = 256;

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses numeric(const std::string& address, int32_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    throw Error(MIMO_ERROR_ARGUMENT, "Hosts meet at a numeric address, not at " + address + ".");
  }
  return {found, &freeaddrinfo};
}

[[noreturn]] void fail_system(const std::string& what, int code) {
  throw Error(MIMO_ERROR_PEER, what + ": " + std::strerror(code) + ".");
}

/// Makes one attempt, until `end`, to be taken in by the parent.
class Attempt {
 public:
  Attempt(const uint8_t* key, int32_t host_index, int64_t end) : key_(key), end_(end) {
    introduction_.host_index = host_index;
  }

  /// The connection on which both sides have proved themselves; null when the parent has closed it before, or it is too late.
  /// `code`: the error of a parent that cannot be reached, or 0.
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
    if (code != 0 || !introduce()) return nullptr;
    return std::move(link_);
  }

 private:
  bool wait_for(short events) const {
    pollfd waiting{link_->socket(), events, 0};
    return poll(&waiting, 1, look_milliseconds) > 0;
  }

  /// The next word, if it comes in time.
  bool hear(Word& word) {
    while (!link_->next(word)) {
      if (link_->closed() || monotonic_nanoseconds() > end_) return false;
      wait_for(POLLIN);
      link_->receive();
    }
    return true;
  }

  bool introduce() {
    Word word;
    if (!hear(word) || word != Word::greeting) return false;
    introduction_.parent = link_->as<Nonce>();
    if (getrandom(&introduction_.child, sizeof(Nonce), 0) != sizeof(Nonce)) return false;
    const Proof proof = prove(key_, Side::child, introduction_);
    link_->say(Word::hello, Hello{introduction_.host_index, introduction_.child, proof});
    link_->send();
    if (!hear(word)) return false;
    if (word == Word::refusal) {
      throw Error(MIMO_ERROR_PEER, "The host above this one does not take it in: it has another key for this run.");
    }
    const Proof expected = prove(key_, Side::parent, introduction_);
    if (word != Word::welcome ||
        !equal_in_constant_time(expected.bytes, link_->as<Proof>().bytes, sizeof(expected.bytes))) {
      throw Error(MIMO_ERROR_PEER, "The address of the host above this one does not prove that it belongs to this run: it has another key.");
    }
    link_->trust(key_, Side::child, introduction_);
    return true;
  }

  const uint8_t* key_;
  const int64_t end_;
  Introduction introduction_{};
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
  fail_system("The other hosts cannot meet this one at " + address, code);
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
    // A connection that strangers keep out of the parent's queue is tried anew; a parent that is slow gets more and more time.
    const int64_t now = monotonic_nanoseconds();
    Attempt attempt(key, own, std::min(end, now + std::max(1000 * millisecond, (now - began) / 4)));
    if (std::unique_ptr<Link> link = attempt.make(*at, code)) return link;
    // A connection that was reset has been dropped for a later one.
    const bool again = code == 0 || code == ECONNRESET || (code == ETIMEDOUT && monotonic_nanoseconds() <= end);
    if (!again) {
      fail_system(parent + " cannot be reached at " + where + ", where hosts tell each other how their ranks are", code);
    }
    if (monotonic_nanoseconds() > end) {
      throw Error(MIMO_ERROR_PEER, parent + " did not take this host in at " + where + " within " +
                                       std::to_string(milliseconds / 1000) +
                                       " s: others connect there all the time and keep it busy.");
    }
    usleep(retry_microseconds);
  }
}

}  // namespace mimo
