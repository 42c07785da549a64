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

#include "rank_state.h"
#include "start_thread.h"
#include "status.h"

namespace mimo {
namespace {

constexpr int64_t progress_interval = 200 * millisecond;
/// Most milliseconds between polls of the board while postings are exchanged, and otherwise.
constexpr int poll_milliseconds = 5, idle_poll_milliseconds = 20;
/// Time for which the short interval applies after the latest posting or request.
constexpr int64_t fast_poll_time = 1000 * millisecond;
/// Bounds of unauthenticated connections: the time to authenticate, how many are held, and how many are accepted per poll. When
/// all places are taken, a new connection replaces the oldest: 800 replacements per second take 4 % of a processor and leave a
/// host 80 ms to authenticate.
constexpr int64_t handshake_timeout = 5'000 * millisecond;
constexpr int64_t max_unauthenticated = 64;
constexpr int max_accepted_per_poll = 16, max_replaced_per_poll = 4;
/// Time without a message after which a host has failed. It is longer than `longest_silence`, so that a silent rank is detected on
/// its own host first.
constexpr int64_t silence_timeout = 5500 * millisecond;
/// Most silence that a single poll counts, because this process itself may have been stopped since the last poll.
constexpr int64_t longest_poll = 1000 * millisecond;

}  // namespace

Relay::Relay(Run& run, const uint8_t* key, std::unique_ptr<Link> parent, int listener)
    : run_(run), own_host_(run.header().own_host), depth_(depth_of(own_host_)),
      children_(children_of(own_host_, run.header().hosts)), listener_(listener) {
  std::memcpy(key_, key, sizeof(key_));
  if (parent != nullptr) {
    parent_ = &peers_.emplace_back(std::move(parent));
    parent_->host_index = parent_of(own_host_);
    parent_->unsent_identities = run.local_ranks();
  }
  sockaddr_storage at{};
  socklen_t length = sizeof(at);
  if (listener_ >= 0 && getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &length) == 0) {
    port_ = ntohs(at.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(at).sin6_port
                                           : reinterpret_cast<sockaddr_in&>(at).sin_port);
  }
  try {
    thread_ = start_thread([this] { event_loop(); });
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

void Relay::event_loop() {
  int64_t last_progress = 0, last_poll = monotonic_nanoseconds();
  while (!(stop_ && done())) {
    std::vector<pollfd> sockets;
    if (listener_ >= 0 && last_poll >= accept_at_) sockets.push_back({listener_, POLLIN, 0});
    for (const Peer& peer : peers_) {
      const int events = POLLIN | (peer.link->has_unsent() ? POLLOUT : 0);
      // A closed socket would end every poll at once.
      if (!peer.link->closed()) sockets.push_back({peer.link->socket(), static_cast<short>(events), 0});
    }
    const bool busy = listener_ >= 0 || run_.failed() || last_poll < fast_polls_until_;
    poll(sockets.data(), sockets.size(), busy ? poll_milliseconds : idle_poll_milliseconds);
    const int64_t now = monotonic_nanoseconds();
    for (Peer& peer : peers_) receive(peer, std::min(now - last_poll, longest_poll));
    last_poll = now;
    if (listener_ >= 0) accept_connections();
    poll_board();
    if (run_.failed()) {
      exchange_after_failure();
    } else if (now - last_progress >= progress_interval) {
      last_progress = now;
      send_progress();
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
  // The last messages are sent as far as the other sides receive them within a second.
  const int64_t end = monotonic_nanoseconds() + 1000 * millisecond;
  for (Peer& peer : peers_) {
    while (peer.link->has_unsent() && !peer.link->closed() && monotonic_nanoseconds() < end) {
      peer.link->flush();
      usleep(1000);
    }
  }
}

bool Relay::local_ranks_finished() const {
  const std::vector<int32_t>& ranks = run_.local_ranks();
  return std::all_of(ranks.begin(), ranks.end(),
                     [&](int32_t rank) { return run_.region(rank).phase == MIMO_RANK_PHASE_FINISHED; });
}

/// Whether every child is connected.
bool Relay::all_connected() const {
  return children_ == std::count_if(peers_.begin(), peers_.end(), [&](const Peer& peer) { return is_child(peer); });
}

/// Whether no other host needs this relay any longer.
bool Relay::done() const {
  if (run_.failed()) return run_.header().settled != 0;
  const bool below = all_children([](const Peer& peer) { return peer.finished; });
  return local_ranks_finished() && below && (parent_ == nullptr || parent_->finished);
}

void Relay::accept_connections() {
  drop_expired_unauthenticated();
  if (all_connected()) return stop_listening();
  const int64_t now = monotonic_nanoseconds();
  int replaced = 0;
  for (int taken = 0; taken < max_accepted_per_poll && now >= accept_at_; ++taken) {
    const int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (socket < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)) return;
    if (socket < 0 || !challenge(socket)) {
      // Without free descriptors or memory, the waiting connections would end every poll at once.
      accept_at_ = now + 100 * millisecond;
    } else if (drop_oldest_unauthenticated() && ++replaced == max_replaced_per_poll) {
      accept_at_ = now + poll_milliseconds * millisecond;
    }
  }
}

/// Adds an unauthenticated connection and sends it a challenge.
bool Relay::challenge(int socket) {
  auto link = std::make_unique<Link>(socket);
  Nonce nonce;
  if (getrandom(nonce.bytes, sizeof(nonce.bytes), 0) != sizeof(nonce.bytes)) return false;
  Peer& peer = peers_.emplace_back(std::move(link));
  peer.connected_at = monotonic_nanoseconds();
  peer.nonce = nonce;
  peer.link->send(MessageType::challenge, nonce);
  return true;
}

/// Drops the oldest unauthenticated connection, which has had the most time to authenticate, when too many are held. Returns
/// whether it has dropped a connection.
bool Relay::drop_oldest_unauthenticated() {
  const auto unauthenticated = [](const Peer& peer) { return peer.host_index < 0; };
  if (std::count_if(peers_.begin(), peers_.end(), unauthenticated) <= max_unauthenticated) return false;
  peers_.erase(std::find_if(peers_.begin(), peers_.end(), unauthenticated));
  return true;
}

/// Drops unauthenticated connections that are closed, by either side, or are too old.
void Relay::drop_expired_unauthenticated() {
  const int64_t now = monotonic_nanoseconds();
  peers_.remove_if([&](const Peer& peer) {
    return peer.host_index < 0 && (peer.link->closed() || now - peer.connected_at > handshake_timeout);
  });
}

/// All children are connected.
void Relay::stop_listening() {
  close(listener_);
  listener_ = -1;
  peers_.remove_if([](const Peer& peer) { return peer.host_index < 0; });
}

void Relay::receive(Peer& peer, int64_t elapsed) {
  peer.link->receive();
  if (peer.host_index < 0) return receive_response(peer);
  peer.silence += elapsed;
  MessageType type;
  while (peer.link->next(type)) {
    peer.silence = 0;
    handle(peer, type);
  }
  if (peer.finished) return;
  const std::string& fault = peer.link->fault();
  if (!fault.empty()) lose(peer, "the connection to its host was closed: " + fault);
  else if (peer.link->closed()) lose(peer, "its process has ended or its host is cut off: the connection was closed");
  else if (peer.silence > silence_timeout) lose(peer, "its process or its host has been silent for 5 s");
}

/// Receives the only message that an unauthenticated connection may send: its response to the challenge.
void Relay::receive_response(Peer& peer) {
  MessageType type;
  if (!peer.link->next(type)) return;
  if (type == MessageType::response && authenticate(peer, peer.link->as<Response>())) return;
  peer.link->send(MessageType::refused);
  peer.link->close_with_fault("it is not authenticated as a host of this run");
}

bool Relay::authenticate(Peer& peer, const Response& hello) {
  if (hello.host_index <= 0 || hello.host_index >= run_.header().hosts) return false;
  if (parent_of(hello.host_index) != own_host_) return false;
  const Handshake handshake{peer.nonce, hello.nonce, hello.host_index};
  const Proof expected = make_proof(key_, Side::child, handshake);
  if (!equal_in_constant_time(expected.bytes, hello.proof.bytes, sizeof(expected.bytes))) return false;
  const bool known = std::any_of(peers_.begin(), peers_.end(),
                                 [&](const Peer& other) { return other.host_index == hello.host_index; });
  if (known) return false;
  peer.host_index = hello.host_index;
  // Every host knows the identities of the root's ranks, which the root's children forward.
  if (own_host_ == 0) peer.unsent_identities = run_.local_ranks();
  peer.link->send(MessageType::accepted, make_proof(key_, Side::parent, handshake));
  peer.link->set_authenticated(key_, Side::parent, handshake);
  return true;
}

/// The connection is lost before the run has ended.
void Relay::lose(Peer& peer, const std::string& reason) {
  peer.begun_end = peer.states_end = peer.finished = true;
  if (run_.failed()) return;
  if (peer.host_index == 0) run_.header().root_lost = 1;
  int32_t first = 0;
  while (first < run_.ranks() && run_.host_of(first) != peer.host_index) ++first;
  run_.fail(first, reason);
}

void Relay::handle(Peer& peer, MessageType type) {
  Link& link = *peer.link;
  const bool of_child = &peer != parent_;
  switch (type) {
    case MessageType::progress:
      if (!of_child) store(link.as<ProgressSummary>(), run_.header().progress_of_run);
      peer.progress = link.as<ProgressSummary>();
      peer.progress_time = monotonic_nanoseconds();
      break;
    case MessageType::identity:
      if (may_report(peer, link.as<RankIdentity>().rank)) handle_identity(peer, link.as<RankIdentity>());
      break;
    case MessageType::posting_request:
      if (of_child) request_posting(link.as<PostingRequest>().key, &peer);
      break;
    case MessageType::posting:
      forward_posting(link.as<Posting>());
      break;
    case MessageType::failure: {
      const Failure& failure = link.as<Failure>();
      if (failure.rank >= -1 && failure.rank < run_.ranks()) run_.fail(failure.rank, failure.reason);
      break;
    }
    case MessageType::rank_state:
      if (!of_child || !may_report(peer, link.as<RankState>().rank)) break;
      store_rank_state(run_, link.as<RankState>());
      if (parent_ != nullptr) parent_->link->send(MessageType::rank_state, link.as<RankState>());
      break;
    case MessageType::begun_range: {
      std::vector<BegunRange>& ranges = of_child ? begun_below_ : begun_;
      const auto most = static_cast<size_t>(begun_capacity(run_.ranks()));
      if (ranges.size() < most) ranges.push_back(link.as<BegunRange>());
      break;
    }
    case MessageType::begun_end:
      peer.begun_end = true;
      break;
    case MessageType::states_end:
      if (of_child) peer.states_end = true;
      break;
    case MessageType::finished:
      if (of_child) peer.finished = true;
      break;
    case MessageType::challenge:
    case MessageType::response:
    case MessageType::accepted:
    case MessageType::refused:
      break;  // An authenticated link refuses these.
  }
}

/// Whether messages of `peer` may be about `rank`: a child's about ranks of its host and of hosts below it, the parent's about
/// ranks of the root.
bool Relay::may_report(const Peer& peer, int32_t rank) const {
  if (rank < 0 || rank >= run_.ranks() || run_.is_local(rank)) return false;
  return &peer == parent_ ? run_.host_of(rank) == 0 : is_below(run_.host_of(rank), peer.host_index);
}

void Relay::handle_identity(Peer& peer, const RankIdentity& identity) {
  store_identity(run_, identity);
  for (Peer& other : peers_) {
    const bool forwards = &peer == parent_ ? is_child(other) : &other == parent_;
    if (forwards) other.link->send(MessageType::identity, identity);
  }
}

/// Sends the identities of ranks that have joined since the last call.
void Relay::send_identities(Peer& peer) {
  const auto sent = [&](int32_t rank) {
    if (run_.region(rank).phase == MIMO_RANK_PHASE_ABSENT) return false;
    peer.link->send(MessageType::identity, identity_of(run_, rank));
    return true;
  };
  std::vector<int32_t>& unsent = peer.unsent_identities;
  unsent.erase(std::remove_if(unsent.begin(), unsent.end(), sent), unsent.end());
}

ProgressSummary Relay::progress_below() const {
  ProgressSummary below{0, 0, -1, -1, -1, std::numeric_limits<int64_t>::max()};
  const int64_t now = monotonic_nanoseconds();
  for (const Peer& peer : peers_) {
    if (!is_child(peer)) continue;
    ProgressSummary of = peer.progress;
    // Before its first summary a child counts as making progress.
    if (of.progress_age >= 0 && peer.progress_time > 0) of.progress_age += now - peer.progress_time;
    below = merged(below, of);
  }
  return all_connected() ? below : merged(below, ProgressSummary{0, 0, -1, -1, 0, 0});
}

void Relay::send_progress() {
  const ProgressSummary below = progress_below();
  store(below, run_.header().progress_below);
  const ProgressSummary up = merged(run_.progress_of_host(), below);
  if (parent_ == nullptr) store(up, run_.header().progress_of_run);
  const ProgressSummary down = run_.progress_of_run();
  for (Peer& peer : peers_) {
    if (peer.host_index < 0) continue;
    send_identities(peer);
    peer.link->send(MessageType::progress, &peer == parent_ ? up : down);
  }
  const bool finished = local_ranks_finished() && all_children([](const Peer& peer) { return peer.finished; });
  if (parent_ == nullptr || parent_->finished || !finished) return;
  // After the summary in which all ranks have finished.
  parent_->link->send(MessageType::finished);
  parent_->finished = true;
}

// ---- postings

/// Handles new postings and requests of this host's ranks.
void Relay::poll_board() {
  const Board& board = run_.board();
  const int64_t postings = board.postings.load(std::memory_order_acquire);
  const int64_t requests = board.requests.load(std::memory_order_acquire);
  for (; postings_seen_ < postings; ++postings_seen_) {
    const Posting& posting = run_.posting(postings_seen_);
    if (posting.scope == PostingScope::host || posting.remote != 0) continue;
    // This host's board already has the posting.
    const auto waiting = requesters_.find(posting.key);
    if (waiting != requesters_.end()) {
      waiting->second.erase(std::remove(waiting->second.begin(), waiting->second.end(), nullptr), waiting->second.end());
    }
    forward_posting(posting);
  }
  for (; requests_seen_ < requests; ++requests_seen_) request_posting(run_.requested_key(requests_seen_), nullptr);
}

/// `from`: the child that requests the posting; null: a rank of this host.
void Relay::request_posting(uint64_t key, Peer* from) {
  fast_polls_until_ = monotonic_nanoseconds() + fast_poll_time;
  const auto known = postings_.find(key);
  if (known != postings_.end()) return deliver_posting(known->second, from);
  std::vector<Peer*>& waiting = requesters_[key];
  if (std::find(waiting.begin(), waiting.end(), from) != waiting.end()) return;
  waiting.push_back(from);
  if (waiting.size() == 1 && parent_ != nullptr) parent_->link->send(MessageType::posting_request, PostingRequest{key});
}

/// Sends a posting to the parent and to the children that have requested it.
void Relay::forward_posting(const Posting& posting) {
  fast_polls_until_ = monotonic_nanoseconds() + fast_poll_time;
  if (!postings_.emplace(posting.key, posting).second) return;
  if (parent_ != nullptr) parent_->link->send(MessageType::posting, posting);
  const auto waiting = requesters_.find(posting.key);
  if (waiting == requesters_.end()) return;
  for (Peer* const to : waiting->second) deliver_posting(posting, to);
  requesters_.erase(waiting);
}

void Relay::deliver_posting(const Posting& posting, Peer* to) {
  Posting delivered = posting;
  delivered.remote = 1;
  if (to != nullptr) return to->link->send(MessageType::posting, delivered);
  try {
    run_.add_posting(delivered);
  } catch (const Error&) {
    // add_posting() has failed the run.
  }
}

}  // namespace mimo
