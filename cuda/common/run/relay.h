// Keeps the shared files of a run's hosts consistent. The relays form a tree (run_layout.h) with at most MIMO_HOST_FAN_OUT children
// per host; the root is host 0, the host of rank 0. The first rank of every host runs its relay, one thread, which is connected to
// the relays of the parent host and of the child hosts. A host therefore has at most 33 connections.
//
// Every 200 ms a relay sends its parent a summary of the progress of its host and of all hosts below, and its children a summary of
// the whole run: one message per connection. The identity of a rank is sent up once. A posting is sent up to the root, as is a
// request for it, and then down to the hosts that requested it.
//
// A failure is sent on at once, in all directions. Then each host sends up which collectives its ranks had begun, merged at every
// level, and the root sends the merged ranges down, so that a rank that aborts a collective knows which ranks had not begun it.
// The states of ranks are sent up at once, and again 0.8 s later, when ranks have recorded the missing ranks.
//
// A relay watches its parent and its children. When one of these closes the connection or sends nothing for 5.5 s, the relay fails
// the run and blames the first rank of that host. Hosts on both sides of the lost connection do so by themselves.
//
// A relay listens only until all its children are authenticated (relay_link.h). Until then it holds a bounded number of
// unauthenticated connections, each for a bounded time and with a buffer for a single short message.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "relay_link.h"
#include "run.h"

namespace mimo {

class Relay {
 public:
  /// `key`: 32 bytes. `parent`: the authenticated connection to it; null at the root. `listener`: a listening socket for the
  /// children, which the relay takes over; -1 without children.
  Relay(Run& run, const uint8_t* key, std::unique_ptr<Link> parent, int listener);
  /// Waits until all ranks of this host and of hosts below have finished, or the failed run is settled.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  /// The port it listens on; 0: it does not listen.
  int32_t port() const { return port_; }
  /// Messages so far.
  int64_t sent() const { return sent_; }
  int64_t received() const { return received_; }

 private:
  /// The relay of the parent or of a child, or an unauthenticated connection.
  struct Peer {
    explicit Peer(std::unique_ptr<Link> connection) : link(std::move(connection)) {}
    std::unique_ptr<Link> link;
    int32_t host_index = -1;                         // -1: unauthenticated
    Nonce nonce{};                                   // sent in the challenge
    std::vector<int32_t> unsent_identities;          // ranks whose identity is still to be sent
    ProgressSummary progress{0, 0, -1, -1, 0, 0};    // a child's latest
    int64_t progress_time = 0;                       // when it came; 0: it has not
    bool failure_sent = false;
    bool begun_end = false;   // received: the peer has sent all its BegunRanges
    bool states_end = false;  // received from a child, or sent to the parent: all final states below are sent
    bool finished = false;    // received from a child, or sent to the parent; or the connection is lost
    int64_t connected_at = 0;  // monotonic nanoseconds
    int64_t silence = 0;       // nanoseconds without a message
  };

  void event_loop();
  void accept_connections();
  bool challenge(int socket);
  bool drop_oldest_unauthenticated();
  void drop_expired_unauthenticated();
  void stop_listening();
  void receive(Peer& peer, int64_t elapsed);
  void receive_response(Peer& peer);
  bool authenticate(Peer& peer, const Response& response);
  void handle(Peer& peer, MessageType type);
  void handle_identity(Peer& peer, const RankIdentity& identity);
  void lose(Peer& peer, const std::string& reason);
  bool may_report(const Peer& peer, int32_t rank) const;
  bool is_child(const Peer& peer) const { return peer.host_index >= 0 && &peer != parent_; }
  /// Whether `holds` is true of every connected child.
  template <class Holds>
  bool all_children(Holds&& holds) const {
    return std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) { return !is_child(peer) || holds(peer); });
  }
  bool all_connected() const;
  bool local_ranks_finished() const;
  bool done() const;

  void poll_board();
  void request_posting(uint64_t key, Peer* from);
  void forward_posting(const Posting& posting);
  void deliver_posting(const Posting& posting, Peer* to);

  void send_progress();
  ProgressSummary progress_below() const;
  void send_identities(Peer& peer);

  void exchange_after_failure();
  void send_failure(Peer& peer);
  void gather_begun(int64_t since);
  void publish_begun(const std::vector<BegunRange>& ranges);
  void settle(int64_t since);
  static void send_begun(Peer& peer, const std::vector<BegunRange>& ranges);

  Run& run_;
  uint8_t key_[32];
  const int32_t own_host_;
  const int32_t depth_;     // of this host in the tree
  const int32_t children_;  // expected number
  Peer* parent_ = nullptr;
  int listener_;  // -1: not listening
  int32_t port_ = 0;
  int64_t accept_at_ = 0;  // monotonic nanoseconds before which no connection is accepted
  std::list<Peer> peers_;

  int64_t postings_seen_ = 0, requests_seen_ = 0;               // entries of this host's board that are handled
  std::unordered_map<uint64_t, Posting> postings_;              // that this relay has sent on
  std::unordered_map<uint64_t, std::vector<Peer*>> requesters_;  // of postings that have not come; null: this host
  int64_t fast_polls_until_ = 0;  // monotonic nanoseconds

  std::vector<BegunRange> begun_below_, begun_;  // of ranks of this host and below, and of all ranks
  bool begun_gathered_ = false;
  bool final_states_sent_ = false;
  int64_t begun_published_at_ = 0;  // monotonic nanoseconds; 0: not yet

  std::atomic<int64_t> sent_{0}, received_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// Listens at any port of the numeric `address` of this host. Returns the socket, or -1 without hosts below this host.
int listen_for_children(const Run& run, const std::string& address);
/// Connects to the parent of this host and authenticates with `key` (32 bytes). Tries again while other connections crowd the
/// parent's accept queue. Throws MIMO_ERROR_PEER after `milliseconds`, and at once when the parent does not listen or has another
/// key.
std::unique_ptr<Link> connect_to_parent(const Run& run, const std::string& address, int32_t port, const uint8_t* key,
                                        int64_t milliseconds = 15'000);

}  // namespace mimo
