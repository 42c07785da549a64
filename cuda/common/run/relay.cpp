#include "relay.h"

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
/// Strangers: how long one has to prove that it is a host of the run, how many are held, and how many come in at a time.
constexpr int64_t proof_limit = 5'000 * millisecond;
constexpr int64_t most_strangers = 64;
constexpr int accepted_at_once = 16;
/// Hosts beat. A host that has not for this long is gone, or its process is stopped; a rank's own heartbeat is missed
/// sooner.
constexpr int64_t silence_limit = 5500 * millisecond;
/// A look counts at most this much silence: this process may have been stopped itself.
constexpr int64_t longest_look = 1000 * millisecond;
/// Limits after a failure: to receive the whereabouts of the other hosts' ranks, for ranks to note which ranks they
/// waited for, and for both together.
constexpr int64_t gather_limit = 1200 * millisecond;
constexpr int64_t note_time = 800 * millisecond;
constexpr int64_t settle_limit = 2500 * millisecond;

}  // namespace

Relay::Relay(Run& run, const uint8_t* key, int listener) : run_(run), centre_(true), listener_(listener) {
  std::memcpy(key_, key, sizeof(key_));
  sockaddr_storage at{};
  socklen_t length = sizeof(at);
  if (getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &length) == 0) {
    port_ = ntohs(at.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(at).sin6_port
                                           : reinterpret_cast<sockaddr_in&>(at).sin_port);
  }
  thread_ = std::thread([this] { work(); });
}

Relay::Relay(Run& run, std::unique_ptr<Link> centre) : run_(run), centre_(false), listener_(-1) {
  Peer& peer = peers_.emplace_back(std::move(centre));
  peer.host_index = 0;
  peer.named.resize(static_cast<size_t>(run.ranks()));
  thread_ = std::thread([this] { work(); });
}

Relay::~Relay() {
  stop_ = true;
  thread_.join();
  if (listener_ >= 0) close(listener_);
}

void Relay::work() {
  int64_t last_beat = 0, last_look = monotonic_nanoseconds();
  while (!(stop_ && over())) {
    std::vector<pollfd> sockets;
    if (listener_ >= 0 && last_look >= accept_at_) sockets.push_back({listener_, POLLIN, 0});
    for (const Peer& peer : peers_) {
      const int events = POLLIN | (peer.link->has_unsent() ? POLLOUT : 0);
      // A link that is gone would wake at once, for ever.
      if (!peer.link->closed()) sockets.push_back({peer.link->socket(), static_cast<short>(events), 0});
    }
    poll(sockets.data(), sockets.size(), look_milliseconds);
    const int64_t now = monotonic_nanoseconds();
    for (Peer& peer : peers_) hear(peer, std::min(now - last_look, longest_look));
    last_look = now;
    if (listener_ >= 0) accept_hosts();
    const bool beat = now - last_beat >= beat_interval;
    if (beat) last_beat = now;
    look_after_failure();
    for (Peer& peer : peers_) {
      if (peer.host_index >= 0) tell(peer, beat);
      peer.link->send();
    }
  }
  // The last words are sent as far as the other side takes them.
  const int64_t end = monotonic_nanoseconds() + 1000 * millisecond;
  for (Peer& peer : peers_) {
    while (peer.link->has_unsent() && !peer.link->closed() && monotonic_nanoseconds() < end) {
      peer.link->send();
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
  drop_strangers();
  const auto hosts = std::count_if(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.host_index >= 0; });
  if (hosts == run_.header().hosts - 1) return stop_listening();
  const int64_t now = monotonic_nanoseconds();
  for (int taken = 0; taken < accepted_at_once && now >= accept_at_; ++taken) {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket >= 0 && greet(socket)) continue;
    if (socket < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)) return;
    // This process has no descriptors or no memory left: waiting connections would wake it again and again.
    accept_at_ = now + 100 * millisecond;
  }
}

/// Holds a stranger. Where there are too many, it takes the place of the oldest, which has had the most time to prove
/// itself.
bool Relay::greet(int socket) {
  auto link = std::make_unique<Link>(socket);
  Nonce nonce;
  if (getrandom(nonce.bytes, sizeof(nonce.bytes), 0) != sizeof(nonce.bytes)) return false;
  const auto stranger = [](const Peer& peer) { return peer.host_index < 0; };
  if (std::count_if(peers_.begin(), peers_.end(), stranger) >= most_strangers) {
    peers_.erase(std::find_if(peers_.begin(), peers_.end(), stranger));
  }
  Peer& peer = peers_.emplace_back(std::move(link));
  peer.since = monotonic_nanoseconds();
  peer.nonce = nonce;
  peer.link->say(Word::greeting, nonce);
  return true;
}

/// Those that have gone, said something else than a proof, or taken too long for it, whether they say something or not.
void Relay::drop_strangers() {
  const int64_t now = monotonic_nanoseconds();
  peers_.remove_if([&](const Peer& peer) {
    return peer.host_index < 0 && (peer.link->closed() || now - peer.since > proof_limit);
  });
}

/// Every host of the run is here.
void Relay::stop_listening() {
  close(listener_);
  listener_ = -1;
  peers_.remove_if([](const Peer& peer) { return peer.host_index < 0; });
}

void Relay::hear(Peer& peer, int64_t elapsed) {
  peer.link->receive();
  if (peer.host_index < 0) return hear_stranger(peer);
  peer.silent += elapsed;
  Word word;
  while (peer.link->next(word)) {
    peer.silent = 0;
    take(peer, word);
  }
  if (peer.bye) return;
  const std::string& fault = peer.link->fault();
  if (!fault.empty()) lose(peer, "the connection to its host was given up: " + fault);
  else if (peer.link->closed()) lose(peer, "its process has ended or its host is cut off: the connection was closed");
  else if (peer.silent > silence_limit) lose(peer, "its process or its host has been silent for 5 s");
}

/// A single message is heard of a stranger, which is a proof or its end.
void Relay::hear_stranger(Peer& peer) {
  Word word;
  if (!peer.link->next(word)) return;
  if (word == Word::hello && admit(peer, peer.link->as<Hello>())) return;
  peer.link->say(Word::refusal);
  peer.link->close_for("it has not proved that it is a host of this run");
}

bool Relay::admit(Peer& peer, const Hello& hello) {
  if (hello.host_index <= 0 || hello.host_index >= run_.header().hosts) return false;
  const Introduction introduction{peer.nonce, hello.nonce, hello.host_index};
  const Proof expected = prove(key_, Side::other, introduction);
  if (!equal_in_constant_time(expected.bytes, hello.proof.bytes, sizeof(expected.bytes))) return false;
  const bool known = std::any_of(peers_.begin(), peers_.end(),
                                 [&](const Peer& other) { return other.host_index == hello.host_index; });
  if (known) return false;
  peer.host_index = hello.host_index;
  peer.named.resize(static_cast<size_t>(run_.ranks()));
  peer.link->say(Word::welcome, prove(key_, Side::centre, introduction));
  peer.link->trust(key_, Side::centre, introduction);
  return true;
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
  Link& link = *peer.link;
  switch (word) {
    case Word::beat:
      if (may_tell_of(peer, link.as<Beat>().rank)) take_beat(run_, link.as<Beat>());
      break;
    case Word::name:
      if (may_tell_of(peer, link.as<Name>().rank)) take_name(run_, link.as<Name>());
      break;
    case Word::posting:
      take_posting(peer, link.as<Posting>());
      break;
    case Word::failure: {
      const Failure& failure = link.as<Failure>();
      if (failure.rank >= -1 && failure.rank < run_.ranks()) run_.fail(failure.rank, failure.reason);
      break;
    }
    case Word::region:
      if (may_tell_of(peer, link.as<Whereabouts>().rank)) take_whereabouts(peer, link.as<Whereabouts>());
      break;
    case Word::gathered:
      (centre_ ? peer.told : peer.gathered) = true;
      break;
    case Word::noted:
      peer.noted = true;
      break;
    case Word::bye:
      peer.bye = true;
      break;
    case Word::greeting:
    case Word::hello:
    case Word::welcome:
    case Word::refusal:
      break;  // Links take these from strangers alone.
  }
}

/// Every host posts for itself; the centre passes on the postings of the others.
void Relay::take_posting(const Peer& peer, const Posting& posting) {
  if (centre_ ? posting.host_index != peer.host_index : posting.host_index == run_.header().own_host) return;
  try {
    run_.take_posting(posting);
  } catch (const Error&) {
    // The run has failed.
  }
}

/// Whether `peer` may speak for a rank: the relay of its own host may, and the centre, which passes messages on.
bool Relay::may_tell_of(const Peer& peer, int32_t rank) const {
  if (rank < 0 || rank >= run_.ranks() || run_.is_local(rank)) return false;
  return peer.host_index == 0 || run_.region(rank).host_index == peer.host_index;
}

void Relay::take_whereabouts(Peer& peer, const Whereabouts& told) {
  mimo::take_whereabouts(run_, told);
  if (!centre_ || peer.told) return;
  // The other hosts need to know which ranks had not begun.
  for (Peer& other : peers_) {
    if (other.host_index >= 0 && other.host_index != peer.host_index) other.link->say(Word::region, told);
  }
}

void Relay::tell(Peer& peer, bool beat) {
  Board& board = run_.board();
  const int64_t postings = board.count.load(std::memory_order_acquire);
  for (; peer.postings < postings; ++peer.postings) {
    const Posting& posting = board.postings[peer.postings];
    const bool own = posting.host_index == run_.header().own_host;
    if (own || (centre_ && posting.host_index != peer.host_index)) peer.link->say(Word::posting, posting);
  }
  if (run_.failed()) return tell_end(peer);
  // At beats alone: the regions of a large run are many, and those of other hosts far apart.
  if (!beat) return;
  tell_names(peer);
  const bool all_finished = finished_here();
  for (int32_t rank = 0; rank < run_.ranks(); ++rank) {
    if (run_.is_local(rank)) peer.link->say(Word::beat, beat_of(run_, rank));
  }
  if (centre_ || peer.bye || !all_finished) return;
  // After the beats that say so.
  peer.link->say(Word::bye);
  peer.bye = true;
}

/// Sends the names of ranks that have joined since the last call.
void Relay::tell_names(Peer& peer) {
  for (int32_t rank = 0; rank < run_.ranks(); ++rank) {
    const RankRegion& of = run_.region(rank);
    if (!run_.is_local(rank) && (!centre_ || of.host_index == peer.host_index)) continue;
    if (peer.named[static_cast<size_t>(rank)] || of.phase == MIMO_RANK_PHASE_ABSENT) continue;
    peer.link->say(Word::name, name_of(run_, rank));
    peer.named[static_cast<size_t>(rank)] = true;
  }
}

void Relay::tell_end(Peer& peer) {
  const RunHeader& header = run_.header();
  if (!peer.failure) {
    tell_names(peer);
    Failure failure{header.failed_rank, {}};
    copy_string(failure.reason, sizeof(failure.reason), header.reason);
    peer.link->say(Word::failure, failure);
    tell_whereabouts(run_, *peer.link);
    if (!centre_) peer.link->say(Word::gathered);
    peer.failure = true;
  }
  if (centre_ && header.mirrored != 0 && !peer.gathered) {
    peer.link->say(Word::gathered);
    peer.gathered = true;
  }
  if (!centre_ && mirrored_at_ != 0 && !peer.noted && monotonic_nanoseconds() - mirrored_at_ > note_time) {
    tell_whereabouts(run_, *peer.link);
    peer.link->say(Word::noted);
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
    return peer.noted && (peer.link->closed() || !peer.link->has_unsent());
  });
  const bool quiet = monotonic_nanoseconds() - mirrored_at_ > note_time;
  if ((noted && quiet) || since > settle_limit) header.settled = 1;
}

}  // namespace mimo
