#include "relay.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "status.h"
#include "whereabouts.h"

namespace mimo {
namespace {

constexpr int64_t millisecond = 1'000'000;
constexpr int64_t beat_interval = 200 * millisecond;
/// Postings wait at most this long.
constexpr int look_milliseconds = 5;
/// A stranger has this long to prove that it is a host of the run.
constexpr int64_t hello_limit = 10'000 * millisecond;
/// Hosts beat; one that does not for this long is gone, or its process is stopped. A rank's own heartbeat is missed before.
constexpr int64_t silence_limit = 5500 * millisecond;
/// A look counts at most this much silence: this process may have been stopped itself.
constexpr int64_t longest_look = 1000 * millisecond;
/// After a failure: for the other hosts' whereabouts, for ranks to note for whom they waited, and for all of it.
constexpr int64_t gather_limit = 1200 * millisecond;
constexpr int64_t note_time = 800 * millisecond;
constexpr int64_t settle_limit = 2500 * millisecond;

[[noreturn]] void fail_system(const std::string& what) {
  throw Error(MIMO_ERROR_PEER, what + ": " + std::strerror(errno) + ".");
}

/// 0 where they are equal; takes the same time wherever they differ.
int difference(const uint8_t* a, const uint8_t* b, int32_t bytes) {
  int all = 0;
  for (int32_t i = 0; i < bytes; ++i) all |= a[i] ^ b[i];
  return all;
}

}  // namespace

Relay::Relay(Run& run, const uint8_t* key, int listener, int centre)
    : run_(run), centre_(listener >= 0), listener_(listener) {
  std::memcpy(key_, key, sizeof(key_));
  if (centre >= 0) {
    Peer& peer = peers_.emplace_back(centre);
    peer.named.resize(static_cast<size_t>(run.ranks()));
  }
  thread_ = std::thread([this] { work(); });
}

Relay::~Relay() {
  stop_ = true;
  thread_.join();
  if (listener_ >= 0) close(listener_);
}

int32_t Relay::port() const {
  sockaddr_storage at{};
  socklen_t length = sizeof(at);
  if (getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &length) != 0) fail_system("The hosts cannot meet");
  return ntohs(at.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(at).sin6_port
                                        : reinterpret_cast<sockaddr_in&>(at).sin_port);
}

void Relay::work() {
  int64_t last_beat = 0, last_look = monotonic_nanoseconds();
  while (!(stop_ && over())) {
    std::vector<pollfd> sockets;
    if (listener_ >= 0) sockets.push_back({listener_, POLLIN, 0});
    for (const Peer& peer : peers_) {
      const int events = POLLIN | (peer.link.has_unsent() ? POLLOUT : 0);
      // A link that is gone would wake at once, for ever.
      if (!peer.link.closed()) sockets.push_back({peer.link.socket(), static_cast<short>(events), 0});
    }
    poll(sockets.data(), sockets.size(), look_milliseconds);
    if (listener_ >= 0) accept_hosts();
    const int64_t now = monotonic_nanoseconds();
    for (Peer& peer : peers_) hear(peer, std::min(now - last_look, longest_look));
    last_look = now;
    const bool beat = now - last_beat >= beat_interval;
    if (beat) last_beat = now;
    look_after_failure();
    for (Peer& peer : peers_) {
      if (peer.host_index >= 0) tell(peer, beat);
      peer.link.exchange();
    }
  }
  // The last words are sent as far as the other side takes them.
  const int64_t end = monotonic_nanoseconds() + 1000 * millisecond;
  for (Peer& peer : peers_) {
    while (peer.link.has_unsent() && !peer.link.closed() && monotonic_nanoseconds() < end) {
      peer.link.exchange();
      usleep(1000);
    }
  }
}

bool Relay::finished_here() const {
  for (int32_t rank = 0; rank < run_.ranks(); ++rank) {
    if (run_.is_local(rank) && run_.region(rank).phase != MIMO_RANK_PHASE_FINISHED) return false;
  }
  return true;
}

/// Whether this process is needed no more.
bool Relay::over() const {
  if (run_.failed()) return run_.header().settled != 0;
  return finished_here() && std::all_of(peers_.begin(), peers_.end(),
                                        [](const Peer& peer) { return peer.host_index < 0 || peer.bye; });
}

void Relay::accept_hosts() {
  for (;;) {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket < 0) break;
    Peer& peer = peers_.emplace_back(socket);
    peer.since = monotonic_nanoseconds();
    if (getrandom(peer.nonce.bytes, sizeof(peer.nonce.bytes), 0) != sizeof(peer.nonce.bytes)) {
      peers_.pop_back();
      continue;
    }
    peer.link.say(Word::greeting, peer.nonce);
  }
  const int64_t now = monotonic_nanoseconds();
  std::erase_if(peers_, [&](const Peer& peer) {
    return peer.host_index < 0 && (peer.link.closed() || now - peer.since > hello_limit);
  });
}

void Relay::hear(Peer& peer, int64_t elapsed) {
  peer.link.exchange();
  peer.silent += elapsed;
  Word word;
  while (peer.link.next(word)) {
    peer.silent = 0;
    take(peer, word);
  }
  if (peer.host_index < 0 || peer.bye) return;
  if (peer.link.closed()) lose(peer, "its process has ended or its host is cut off: the connection was closed");
  else if (peer.silent > silence_limit) lose(peer, "its process or its host has been silent for 5 s");
}

/// The other host's process is gone before its time.
void Relay::lose(Peer& peer, const std::string& how) {
  peer.told = peer.noted = peer.bye = true;
  if (run_.failed()) return;
  if (!centre_) run_.header().centre_lost = 1;
  int32_t first = 0;
  while (first < run_.ranks() && run_.region(first).host_index != peer.host_index) ++first;
  run_.fail(first, how);
}

void Relay::take(Peer& peer, Word word) {
  if (peer.host_index < 0) {
    if (centre_ && word == Word::hello) return admit(peer);
    const Nonce* nonce = peer.link.as<Nonce>();
    if (centre_ || word != Word::greeting || nonce == nullptr) return;
    Hello hello{run_.header().own_host, {}};
    prove(key_, *nonce, hello.host_index, hello.proof);
    peer.link.say(Word::hello, hello);
    peer.host_index = 0;
    return;
  }
  if (const Beat* beat = peer.link.as<Beat>(); word == Word::beat && beat != nullptr) {
    if (may_tell_of(peer, beat->rank)) take_beat(run_, *beat);
  } else if (const Name* name = peer.link.as<Name>(); word == Word::name && name != nullptr) {
    if (may_tell_of(peer, name->rank)) take_name(run_, *name);
  } else if (const Posting* posting = peer.link.as<Posting>(); word == Word::posting && posting != nullptr) {
    try {
      run_.take_posting(*posting);
    } catch (const Error&) {
      // The run has failed.
    }
  } else if (const Failure* failure = peer.link.as<Failure>(); word == Word::failure && failure != nullptr) {
    if (failure->rank >= -1 && failure->rank < run_.ranks()) run_.fail(failure->rank, failure->reason);
  } else if (const Whereabouts* told = peer.link.as<Whereabouts>(); word == Word::region && told != nullptr) {
    if (may_tell_of(peer, told->rank)) take_whereabouts(peer, *told);
  } else if (word == Word::gathered) {
    (centre_ ? peer.told : peer.gathered) = true;
  } else if (word == Word::noted) {
    peer.noted = true;
  } else if (word == Word::bye) {
    peer.bye = true;
  }
}

/// Who may tell of a rank: its own host's relay, and the centre, which passes on.
bool Relay::may_tell_of(const Peer& peer, int32_t rank) const {
  if (rank < 0 || rank >= run_.ranks() || run_.is_local(rank)) return false;
  return peer.host_index == 0 || run_.region(rank).host_index == peer.host_index;
}

void Relay::admit(Peer& peer) {
  const Hello* hello = peer.link.as<Hello>();
  if (hello == nullptr || hello->host_index <= 0 || hello->host_index >= run_.header().hosts) return;
  uint8_t expected[32];
  prove(key_, peer.nonce, hello->host_index, expected);
  if (difference(expected, hello->proof, sizeof(expected)) != 0) return;
  peer.host_index = hello->host_index;
  peer.named.resize(static_cast<size_t>(run_.ranks()));
}

void Relay::take_whereabouts(Peer& peer, const Whereabouts& told) {
  mimo::take_whereabouts(run_, told);
  if (!centre_ || peer.told) return;
  // The others want to know who had not begun.
  for (Peer& other : peers_) {
    if (other.host_index >= 0 && other.host_index != peer.host_index) other.link.say(Word::region, told);
  }
}

void Relay::tell(Peer& peer, bool beat) {
  Board& board = run_.board();
  const int64_t postings = board.count.load(std::memory_order_acquire);
  for (; peer.postings < postings; ++peer.postings) {
    const Posting& posting = board.postings[peer.postings];
    const bool own = posting.host_index == run_.header().own_host;
    if (own || (centre_ && posting.host_index != peer.host_index)) peer.link.say(Word::posting, posting);
  }
  if (run_.failed()) return tell_end(peer);
  // At beats alone: the regions of a large run are many, and those of other hosts far apart.
  if (!beat) return;
  tell_names(peer);
  const bool all_finished = finished_here();
  for (int32_t rank = 0; rank < run_.ranks(); ++rank) {
    if (run_.is_local(rank)) peer.link.say(Word::beat, beat_of(run_, rank));
  }
  if (centre_ || peer.bye || !all_finished) return;
  // After the beats that say so.
  peer.link.say(Word::bye);
  peer.bye = true;
}

/// Of the ranks that have joined since the last time.
void Relay::tell_names(Peer& peer) {
  for (int32_t rank = 0; rank < run_.ranks(); ++rank) {
    const RankRegion& of = run_.region(rank);
    if (!run_.is_local(rank) && (!centre_ || of.host_index == peer.host_index)) continue;
    if (peer.named[static_cast<size_t>(rank)] || of.phase == MIMO_RANK_PHASE_ABSENT) continue;
    peer.link.say(Word::name, name_of(run_, rank));
    peer.named[static_cast<size_t>(rank)] = true;
  }
}

void Relay::tell_end(Peer& peer) {
  const RunHeader& header = run_.header();
  if (!peer.failure) {
    tell_names(peer);
    Failure failure{header.failed_rank, {}};
    copy_string(failure.reason, sizeof(failure.reason), header.reason);
    peer.link.say(Word::failure, failure);
    tell_whereabouts(run_, peer.link);
    if (!centre_) peer.link.say(Word::gathered);
    peer.failure = true;
  }
  if (centre_ && header.mirrored != 0 && !peer.gathered) {
    peer.link.say(Word::gathered);
    peer.gathered = true;
  }
  if (!centre_ && mirrored_at_ != 0 && !peer.noted && monotonic_nanoseconds() - mirrored_at_ > note_time) {
    tell_whereabouts(run_, peer.link);
    peer.link.say(Word::noted);
    peer.noted = true;
  }
}

/// Raises `mirrored` when the other hosts have told where their ranks were, `settled` when they have noted the rest.
void Relay::look_after_failure() {
  if (!run_.failed()) return;
  RunHeader& header = run_.header();
  const int64_t since = monotonic_nanoseconds() - header.failed_time;
  const auto all = [&](auto&& of) {
    return std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) { return peer.host_index < 0 || of(peer); });
  };
  if (header.mirrored == 0) {
    const bool here = centre_ ? all([](const Peer& peer) { return peer.told; })
                              : all([](const Peer& peer) { return peer.gathered || peer.bye; });
    if (here || since > gather_limit) {
      header.mirrored = 1;
      mirrored_at_ = monotonic_nanoseconds();
    }
  }
  if (header.mirrored == 0 || header.settled != 0) return;
  const bool noted = all([](const Peer& peer) {
    return peer.noted && (peer.link.closed() || !peer.link.has_unsent());
  });
  const bool quiet = monotonic_nanoseconds() - mirrored_at_ > note_time;
  if ((noted && quiet) || since > settle_limit) header.settled = 1;
}

std::unique_ptr<Relay> listen_for_hosts(Run& run, const uint8_t* key) {
  const int listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in6 six{};
  six.sin6_family = AF_INET6;
  const int off = 0;
  bool bound = false;
  if (listener >= 0) {
    // Every address of this host, of both kinds.
    setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    bound = bind(listener, reinterpret_cast<sockaddr*>(&six), sizeof(six)) == 0 && listen(listener, 1024) == 0;
  }
  if (bound) return std::make_unique<Relay>(run, key, listener, -1);
  if (listener >= 0) close(listener);
  // A system without IPv6.
  const int plain = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in four{};
  four.sin_family = AF_INET;
  if (plain < 0 || bind(plain, reinterpret_cast<sockaddr*>(&four), sizeof(four)) != 0 || listen(plain, 1024) != 0) {
    fail_system("The other hosts cannot meet this one");
  }
  return std::make_unique<Relay>(run, key, plain, -1);
}

std::unique_ptr<Relay> connect_to_centre(Run& run, const std::string& address, int32_t port, const uint8_t* key) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string where = address + ":" + std::to_string(port);
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    throw Error(MIMO_ERROR_ARGUMENT, "mimo_run_connect needs a numeric address, not " + address + ".");
  }
  const int opened = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool met = opened >= 0 && connect(opened, found->ai_addr, found->ai_addrlen) == 0;
  const int error = errno;
  freeaddrinfo(found);
  if (!met) {
    if (opened >= 0) close(opened);
    errno = error;
    fail_system("The host of rank 0 cannot be reached at " + where + ", where hosts tell each other how their ranks are");
  }
  return std::make_unique<Relay>(run, key, -1, opened);
}

}  // namespace mimo
