// Keeps the shared files of a run's hosts alike. Hosts form a tree (run_layout.h) of MIMO_HOST_FAN_OUT children each, whose root,
// the host of rank 0, is the centre; every host's relay is connected to its parent's and to its children's. Each is one thread
// of the host's first rank. So no host holds more than 33 connections, and no host is told more often than it has those.
//
// At every beat a relay tells its parent how the ranks of its host and of all hosts below are (one message, whatever their
// number), and its children how those of the whole run are. Names of ranks go up once. A posting goes up to the centre, a wish
// for it too, and it comes back on the way of the wishes. A failure is sent on at once, in all directions. Then collectives that
// ranks had begun go up, joined on the way, and all of them down, so that a rank that gives up a collective knows which ranks
// had not begun it; where ranks were goes up at once, and again a moment later with their notes about that, for the diagnosis.
//
// A relay watches its parent and its children: one that is gone or silent has failed, by the name of its host's first rank.
// Both sides of it say so, and those cut off from the centre end by their own relay's word.
//
// A relay listens until all its children have proved themselves (relay_link.h), and no longer. Until then strangers may
// connect: a bounded number of them is held, each for a bounded time and with room for a single short message.
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
  /// `parent`: the connection to it, on which both sides have proved themselves; null at the centre. `listener`: a listening
  /// socket for the children, which the relay takes over; -1 without children.
  Relay(Run& run, const uint8_t* key, std::unique_ptr<Link> parent, int listener);
  /// Waits until all ranks of this host and of those below have finished, or the failed run is settled.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  /// Where it listens; 0: it does not.
  int32_t port() const { return port_; }
  /// Messages so far.
  int64_t sent() const { return sent_; }
  int64_t received() const { return received_; }

 private:
  /// Another relay, and how much it has been told.
  struct Peer {
    explicit Peer(std::unique_ptr<Link> connection) : link(std::move(connection)) {}
    std::unique_ptr<Link> link;
    int32_t host_index = -1;       // until it has proved itself
    Nonce nonce{};                 // that it was greeted with
    std::vector<int32_t> unnamed;  // ranks whose names it is to be told
    ProgressSummary outlook{0, 0, -1, -1, 0, 0};  // a child's latest; nothing is known before that
    int64_t outlook_time = 0;
    bool failure = false;  // it has been told that the run has failed
    bool told = false;     // it has sent all that had begun
    bool noted = false;    // by the child, it has sent its ranks' notes after the failure
    bool bye = false;      // said by the child, or the other side is gone
    int64_t since = 0;     // when it came, monotonic nanoseconds
    int64_t silent = 0;    // nanoseconds
  };

  void work();
  void accept_hosts();
  bool greet(int socket);
  bool drop_oldest_stranger();
  void drop_strangers();
  void stop_listening();
  void hear(Peer& peer, int64_t elapsed);
  void hear_stranger(Peer& peer);
  bool admit(Peer& peer, const Response& hello);
  void take(Peer& peer, MessageType type);
  void take_name(Peer& peer, const RankIdentity& name);
  void lose(Peer& peer, const std::string& how);
  bool may_tell_of(const Peer& peer, int32_t rank) const;
  bool is_child(const Peer& peer) const { return peer.host_index >= 0 && &peer != parent_; }
  /// Whether `holds` is true of every child that is here.
  template <class Holds>
  bool all_children(Holds&& holds) const {
    return std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) { return !is_child(peer) || holds(peer); });
  }
  bool complete() const;
  bool finished_here() const;
  bool over() const;

  void look_at_board();
  void wish(uint64_t key, Peer* from);
  void pass_on(const Posting& posting);
  void deliver(const Posting& posting, Peer* to);

  void beat();
  ProgressSummary outlook_below() const;
  void tell_names(Peer& peer);

  void look_after_failure();
  void tell_failure(Peer& peer);
  void gather(int64_t since);
  void publish(const std::vector<BegunRange>& runs);
  void settle(int64_t since);
  static void tell_begun(Peer& peer, const std::vector<BegunRange>& runs);

  Run& run_;
  uint8_t key_[32];
  const int32_t own_host_;
  const int32_t depth_;     // in the tree
  const int32_t children_;  // how many it will have
  Peer* parent_ = nullptr;
  int listener_;  // -1: not, or no longer
  int32_t port_ = 0;
  int64_t accept_at_ = 0;  // not before: after a failure to accept, or as many strangers as a look may replace
  std::list<Peer> peers_;

  int64_t postings_seen_ = 0, wishes_seen_ = 0;           // of this host's board
  std::unordered_map<uint64_t, Posting> postings_;        // that came by
  std::unordered_map<uint64_t, std::vector<Peer*>> wishes_;  // for those that have not; null: of this host
  int64_t busy_until_ = 0;                                // something is on its way that ranks wait for

  std::vector<BegunRange> begun_below_, begun_;  // by ranks of this host and those below, and by all
  bool gathered_ = false;
  bool noted_ = false;  // the parent has been told this host's last notes
  int64_t mirrored_at_ = 0;

  std::atomic<int64_t> sent_{0}, received_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// A listening socket at any port of a numeric `address` of this host; -1 where no hosts are below this one.
int listen_for_children(const Run& run, const std::string& address);
/// A connection to the parent of this host, when both sides have proved that they know `key` (32 bytes). Tries again while
/// strangers keep the parent from taking it in. Throws MIMO_ERROR_PEER after `milliseconds`, and at once when the parent is
/// not there or has another key.
std::unique_ptr<Link> connect_to_parent(const Run& run, const std::string& address, int32_t port, const uint8_t* key,
                                        int64_t milliseconds = 15'000);

}  // namespace mimo
