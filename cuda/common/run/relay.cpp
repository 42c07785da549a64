#include "relay.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "start_thread.h"
#include "status.h"
#include "whereabouts.h"

namespace mimo {
namespace {

constexpr int64_t beat_interval = 200 * millisecond;
/// Postings wait at most this long where some have come lately, and otherwise that long.
constexpr int look_milliseconds = 5, idle_look_milliseconds = 20;
constexpr int64_t busy_time = 1000 * millisecond;
/// Strangers: how long one has to prove that it is a host of the run, how many are held, and how many come in at a look.
/// Where every place is taken, each newcomer costs an older connection its place and this thread the time to close it: 800
/// a second are 4 % of a processor, and leave a host 80 ms for its proof.
constexpr int64_t proof_limit = 5'000 * millisecond;
constexpr int64_t most_strangers = 64;
constexpr int accepted_at_once = 16, replaced_at_once = 4;
/// Hosts beat. A host that has not for this long is gone, or its process is stopped; a rank's own heartbeat is missed
/// sooner.
constexpr int64_t silence_limit = 5500 * millisecond;
/// A look counts at most this much silence: this process may have been stopped itself.
constexpr int64_t longest_look = 1000 * millisecond;
}  // namespace

Relay::Relay(Run& run, const uint8_t* key, std::unique_ptr<Link> parent, int listener)
    : run_(run), own_host_(run.header().own_host), depth_(depth_of(own_host_)),
      children_(children_of(own_host_, run.header().hosts)), listener_(listener) {
  std::memcpy(key_, key, sizeof(key_));
  if (parent != nullptr) {
    parent_ = &peers_.emplace_back(std::move(parent));
    parent_->host_index = parent_of(own_host_);
    parent_->unnamed = run.local_ranks();
  }
  sockaddr_storage at{};
  socklen_t length = sizeof(at);
  if (listener_ >= 0 && getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &length) == 0) {
    port_ = ntohs(at.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(at).sin6_port
                                           : reinterpret_cast<sockaddr_in&>(at).sin_port);
  }
  try {
    thread_ = start_thread([this] { work(); });
  } catch (...) {
    if (listener_ >= 0) close(listener_);
    throw;
  }
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
    const bool busy = listener_ >= 0 || run_.failed() || last_look < busy_until_;
    poll(sockets.data(), sockets.size(), busy ? look_milliseconds : idle_look_milliseconds);
    const int64_t now = monotonic_nanoseconds();
    for (Peer& peer : peers_) hear(peer, std::min(now - last_look, longest_look));
    last_look = now;
    if (listener_ >= 0) accept_hosts();
    look_at_board();
    if (run_.failed()) {
      look_after_failure();
    } else if (now - last_beat >= beat_interval) {
      last_beat = now;
      beat();
    }
    int64_t sent = 0, received = 0;
    for (Peer& peer : peers_) {
      peer.link->flush();
      sent += peer.link->messages_sent();
      received += peer.link->messages_received();
    }
    sent_ = sent;
    received_ = received;
  }
  // The last words are sent as far as the other side takes them.
  const int64_t end = monotonic_nanoseconds() + 1000 * millisecond;
  for (Peer& peer : peers_) {
    while (peer.link->has_unsent() && !peer.link->closed() && monotonic_nanoseconds() < end) {
      peer.link->flush();
      usleep(1000);
    }
  }
}

bool Relay::finished_here() const {
  const std::vector<int32_t>& ranks = run_.local_ranks();
  return std::all_of(ranks.begin(), ranks.end(),
                     [&](int32_t rank) { return run_.region(rank).phase == MIMO_RANK_PHASE_FINISHED; });
}

/// Whether every child is here.
bool Relay::complete() const {
  return children_ == std::count_if(peers_.begin(), peers_.end(), [&](const Peer& peer) { return is_child(peer); });
}

/// Whether this process is needed no more.
bool Relay::over() const {
  if (run_.failed()) return run_.header().settled != 0;
  return finished_here() && all_children([](const Peer& peer) { return peer.bye; }) && (parent_ == nullptr || parent_->bye);
}

void Relay::accept_hosts() {
  drop_strangers();
  if (complete()) return stop_listening();
  const int64_t now = monotonic_nanoseconds();
  int replaced = 0;
  for (int taken = 0; taken < accepted_at_once && now >= accept_at_; ++taken) {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)) return;
    if (socket < 0 || !greet(socket)) {
      // This process has no descriptors or no memory left: waiting connections would wake it again and again.
      accept_at_ = now + 100 * millisecond;
    } else if (drop_oldest_stranger() && ++replaced == replaced_at_once) {
      accept_at_ = now + look_milliseconds * millisecond;
    }
  }
}

/// Holds a stranger.
bool Relay::greet(int socket) {
  auto link = std::make_unique<Link>(socket);
  Nonce nonce;
  if (getrandom(nonce.bytes, sizeof(nonce.bytes), 0) != sizeof(nonce.bytes)) return false;
  Peer& peer = peers_.emplace_back(std::move(link));
  peer.since = monotonic_nanoseconds();
  peer.nonce = nonce;
  peer.link->send(MessageType::challenge, nonce);
  return true;
}

/// Where strangers are too many, drops the oldest, which has had the most time to prove itself. Whether it did.
bool Relay::drop_oldest_stranger() {
  const auto stranger = [](const Peer& peer) { return peer.host_index < 0; };
  if (std::count_if(peers_.begin(), peers_.end(), stranger) <= most_strangers) return false;
  peers_.erase(std::find_if(peers_.begin(), peers_.end(), stranger));
  return true;
}

/// Drops strangers that have gone, said something else than a proof, or taken too long for it, whether they say something or not.
void Relay::drop_strangers() {
  const int64_t now = monotonic_nanoseconds();
  peers_.remove_if([&](const Peer& peer) {
    return peer.host_index < 0 && (peer.link->closed() || now - peer.since > proof_limit);
  });
}

/// Every child is here.
void Relay::stop_listening() {
  close(listener_);
  listener_ = -1;
  peers_.remove_if([](const Peer& peer) { return peer.host_index < 0; });
}

void Relay::hear(Peer& peer, int64_t elapsed) {
  peer.link->receive();
  if (peer.host_index < 0) return hear_stranger(peer);
  peer.silent += elapsed;
  MessageType type;
  while (peer.link->next(type)) {
    peer.silent = 0;
    take(peer, type);
  }
  if (peer.bye) return;
  const std::string& fault = peer.link->fault();
  if (!fault.empty()) lose(peer, "the connection to its host was given up: " + fault);
  else if (peer.link->closed()) lose(peer, "its process has ended or its host is cut off: the connection was closed");
  else if (peer.silent > silence_limit) lose(peer, "its process or its host has been silent for 5 s");
}

/// A single message is heard of a stranger, which is a proof or its end.
void Relay::hear_stranger(Peer& peer) {
  MessageType type;
  if (!peer.link->next(type)) return;
  if (type == MessageType::response && admit(peer, peer.link->as<Response>())) return;
  peer.link->send(MessageType::refused);
  peer.link->close_with_fault("it has not proved that it is a host of this run");
}

bool Relay::admit(Peer& peer, const Response& hello) {
  if (hello.host_index <= 0 || hello.host_index >= run_.header().hosts) return false;
  if (parent_of(hello.host_index) != own_host_) return false;
  const Handshake handshake{peer.nonce, hello.nonce, hello.host_index};
  const Proof expected = make_proof(key_, Side::child, handshake);
  if (!equal_in_constant_time(expected.bytes, hello.proof.bytes, sizeof(expected.bytes))) return false;
  const bool known = std::any_of(peers_.begin(), peers_.end(),
                                 [&](const Peer& other) { return other.host_index == hello.host_index; });
  if (known) return false;
  peer.host_index = hello.host_index;
  // Every host knows the ranks of the centre; the centre's children pass their names on.
  if (own_host_ == 0) peer.unnamed = run_.local_ranks();
  peer.link->send(MessageType::accepted, make_proof(key_, Side::parent, handshake));
  peer.link->set_authenticated(key_, Side::parent, handshake);
  return true;
}

/// The other host's process is gone before its time.
void Relay::lose(Peer& peer, const std::string& how) {
  peer.told = peer.noted = peer.bye = true;
  if (run_.failed()) return;
  if (peer.host_index == 0) run_.header().centre_lost = 1;
  int32_t first = 0;
  while (first < run_.ranks() && run_.host_of(first) != peer.host_index) ++first;
  run_.fail(first, how);
}

void Relay::take(Peer& peer, MessageType type) {
  Link& link = *peer.link;
  const bool of_child = &peer != parent_;
  switch (type) {
    case MessageType::progress:
      if (!of_child) store(link.as<ProgressSummary>(), run_.header().whole);
      peer.outlook = link.as<ProgressSummary>();
      peer.outlook_time = monotonic_nanoseconds();
      break;
    case MessageType::identity:
      if (may_tell_of(peer, link.as<RankIdentity>().rank)) take_name(peer, link.as<RankIdentity>());
      break;
    case MessageType::posting_request:
      if (of_child) wish(link.as<PostingRequest>().key, &peer);
      break;
    case MessageType::posting:
      pass_on(link.as<Posting>());
      break;
    case MessageType::failure: {
      const Failure& failure = link.as<Failure>();
      if (failure.rank >= -1 && failure.rank < run_.ranks()) run_.fail(failure.rank, failure.reason);
      break;
    }
    case MessageType::rank_state:
      if (!of_child || !may_tell_of(peer, link.as<RankState>().rank)) break;
      take_whereabouts(run_, link.as<RankState>());
      if (parent_ != nullptr) parent_->link->send(MessageType::rank_state, link.as<RankState>());
      break;
    case MessageType::begun_range: {
      std::vector<BegunRange>& runs = of_child ? begun_below_ : begun_;
      const auto most = static_cast<size_t>(begun_capacity(run_.ranks()));
      if (runs.size() < most) runs.push_back(link.as<BegunRange>());
      break;
    }
    case MessageType::begun_end:
      peer.told = true;
      break;
    case MessageType::states_end:
      if (of_child) peer.noted = true;
      break;
    case MessageType::finished:
      if (of_child) peer.bye = true;
      break;
    case MessageType::challenge:
    case MessageType::response:
    case MessageType::accepted:
    case MessageType::refused:
      break;  // Links take these from strangers alone.
  }
}

/// Whether `peer` may speak for a rank: a child may for those of its host and of hosts below it, the parent for those of the
/// centre.
bool Relay::may_tell_of(const Peer& peer, int32_t rank) const {
  if (rank < 0 || rank >= run_.ranks() || run_.is_local(rank)) return false;
  return &peer == parent_ ? run_.host_of(rank) == 0 : is_below(run_.host_of(rank), peer.host_index);
}

void Relay::take_name(Peer& peer, const RankIdentity& name) {
  mimo::take_name(run_, name);
  for (Peer& other : peers_) {
    const bool way = &peer == parent_ ? is_child(other) : &other == parent_;
    if (way) other.link->send(MessageType::identity, name);
  }
}

/// Sends the names of ranks that have joined since the last call.
void Relay::tell_names(Peer& peer) {
  const auto told = [&](int32_t rank) {
    if (run_.region(rank).phase == MIMO_RANK_PHASE_ABSENT) return false;
    peer.link->send(MessageType::identity, name_of(run_, rank));
    return true;
  };
  peer.unnamed.erase(std::remove_if(peer.unnamed.begin(), peer.unnamed.end(), told), peer.unnamed.end());
}

ProgressSummary Relay::outlook_below() const {
  ProgressSummary below{0, 0, -1, -1, -1, std::numeric_limits<int64_t>::max()};
  const int64_t now = monotonic_nanoseconds();
  for (const Peer& peer : peers_) {
    if (!is_child(peer)) continue;
    ProgressSummary of = peer.outlook;
    // Of a child that has not said anything yet nothing is wrong.
    if (of.progress_age >= 0 && peer.outlook_time > 0) of.progress_age += now - peer.outlook_time;
    below = merged(below, of);
  }
  return complete() ? below : merged(below, ProgressSummary{0, 0, -1, -1, 0, 0});
}

void Relay::beat() {
  const ProgressSummary below = outlook_below();
  store(below, run_.header().below);
  const ProgressSummary up = merged(run_.own_outlook(), below);
  if (parent_ == nullptr) store(up, run_.header().whole);
  const ProgressSummary whole = run_.whole_outlook();
  for (Peer& peer : peers_) {
    if (peer.host_index < 0) continue;
    tell_names(peer);
    peer.link->send(MessageType::progress, &peer == parent_ ? up : whole);
  }
  const bool finished = finished_here() && all_children([](const Peer& peer) { return peer.bye; });
  if (parent_ == nullptr || parent_->bye || !finished) return;
  // After the outlook that says so.
  parent_->link->send(MessageType::finished);
  parent_->bye = true;
}

// ---- postings

/// Takes postings and wishes of this host's ranks.
void Relay::look_at_board() {
  const Board& board = run_.board();
  const int64_t postings = board.count.load(std::memory_order_acquire);
  const int64_t wishes = board.wished.load(std::memory_order_acquire);
  for (; postings_seen_ < postings; ++postings_seen_) {
    const Posting& posting = run_.posting(postings_seen_);
    if (posting.reach == Reach::host || posting.arrived != 0) continue;
    // Ranks of this host have it.
    const auto waiting = wishes_.find(posting.key);
    if (waiting != wishes_.end()) {
      waiting->second.erase(std::remove(waiting->second.begin(), waiting->second.end(), nullptr), waiting->second.end());
    }
    pass_on(posting);
  }
  for (; wishes_seen_ < wishes; ++wishes_seen_) wish(run_.wish(wishes_seen_), nullptr);
}

/// `from` null: a rank of this host.
void Relay::wish(uint64_t key, Peer* from) {
  busy_until_ = monotonic_nanoseconds() + busy_time;
  const auto known = postings_.find(key);
  if (known != postings_.end()) return deliver(known->second, from);
  std::vector<Peer*>& waiting = wishes_[key];
  if (std::find(waiting.begin(), waiting.end(), from) != waiting.end()) return;
  waiting.push_back(from);
  if (waiting.size() == 1 && parent_ != nullptr) parent_->link->send(MessageType::posting_request, PostingRequest{key});
}

/// A posting of this host's ranks or of another host's.
void Relay::pass_on(const Posting& posting) {
  busy_until_ = monotonic_nanoseconds() + busy_time;
  if (!postings_.emplace(posting.key, posting).second) return;
  if (parent_ != nullptr) parent_->link->send(MessageType::posting, posting);
  const auto waiting = wishes_.find(posting.key);
  if (waiting == wishes_.end()) return;
  for (Peer* const to : waiting->second) deliver(posting, to);
  wishes_.erase(waiting);
}

void Relay::deliver(const Posting& posting, Peer* to) {
  Posting arrived = posting;
  arrived.arrived = 1;
  if (to != nullptr) return to->link->send(MessageType::posting, arrived);
  try {
    run_.take_posting(arrived);
  } catch (const Error&) {
    // The run has failed.
  }
}

}  // namespace mimo
