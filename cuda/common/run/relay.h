// Keeps the shared files of a run's hosts alike. The host of rank 0 is the centre: every other host's relay is
// connected to the centre's, which passes on messages that concern all. Each is one thread of the host's first rank.
//
// Postings, names and a failure are sent at once. At every beat a relay sends the state of its ranks: the centre
// receives that of all ranks, the other hosts that of the centre's. When the run has failed each host sends where its
// ranks were, so that a rank that gives up a collective knows which ranks had not begun it, and a moment later the
// notes of its ranks about that, for the diagnosis.
//
// The centre listens until every host of the run has proved itself (relay_link.h), and no longer. Until then strangers may
// connect: a bounded number of them is held, each for a bounded time and with room for a single short message.
#pragma once
#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "relay_link.h"
#include "run.h"

namespace mimo {

class Relay {
 public:
  /// The centre's, which takes over a listening socket.
  Relay(Run& run, const uint8_t* key, int listener);
  /// Any other host's, with the connection to the centre, on which both sides have proved themselves.
  Relay(Run& run, std::unique_ptr<Link> centre);
  /// Waits until all ranks of this host have finished (at the centre: of all hosts), or the failed run is settled.
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  /// Where the centre listens.
  int32_t port() const { return port_; }

 private:
  /// Another relay, and how much it has been told.
  struct Peer {
    explicit Peer(std::unique_ptr<Link> connection) : link(std::move(connection)) {}
    std::unique_ptr<Link> link;
    int32_t host_index = -1;  // until it has proved itself
    Nonce nonce{};            // that it was greeted with
    int64_t postings = 0;
    std::vector<bool> named;
    bool failure = false, gathered = false;
    bool told = false;   // it has sent where its ranks were
    bool noted = false;  // it has sent their notes after the failure
    bool bye = false;    // sent by the side that is not the centre
    int64_t since = 0;   // when it came, monotonic nanoseconds
    int64_t silent = 0;  // nanoseconds
  };

  void work();
  void accept_hosts();
  bool greet(int socket);
  void drop_strangers();
  void stop_listening();
  void hear(Peer& peer, int64_t elapsed);
  void hear_stranger(Peer& peer);
  bool admit(Peer& peer, const Hello& hello);
  void take(Peer& peer, Word word);
  void take_posting(const Peer& peer, const Posting& posting);
  void take_whereabouts(Peer& peer, const Whereabouts& told);
  void tell(Peer& peer, bool beat);
  void tell_names(Peer& peer);
  void tell_end(Peer& peer);
  void look_after_failure();
  void lose(Peer& peer, const std::string& how);
  bool may_tell_of(const Peer& peer, int32_t rank) const;
  bool finished_here() const;
  bool over() const;

  Run& run_;
  uint8_t key_[32];
  const bool centre_;
  int listener_;  // -1: not, or no longer
  int32_t port_ = 0;
  int64_t accept_at_ = 0;  // not before, after a failure to accept
  std::list<Peer> peers_;
  int64_t mirrored_at_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// The centre's relay, at any port of a numeric `address` of this host. `key`: 32 bytes that all hosts of the run know.
std::unique_ptr<Relay> listen_for_hosts(Run& run, const std::string& address, const uint8_t* key);
/// Another host's relay, when both sides have proved that they know `key`. Tries again while strangers keep the centre from
/// taking it in. Throws MIMO_ERROR_PEER after `milliseconds`, and at once when the centre is not there or has another key.
std::unique_ptr<Relay> connect_to_centre(Run& run, const std::string& address, int32_t port, const uint8_t* key,
                                         int64_t milliseconds = 15'000);

}  // namespace mimo
