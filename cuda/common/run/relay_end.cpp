// Relays of a failed run exchange the failure, the collectives that ranks had begun, and the ranks that they waited for.
#include <unistd.h>

#include <algorithm>

#include "relay.h"
#include "whereabouts.h"

namespace mimo {
namespace {

/// Limits after a failure: to gather the collectives that ranks had begun, for ranks to note which ranks they waited for, and
/// for both together. A host stops waiting for those below it a little before its parent stops waiting for it.
constexpr int64_t gather_limit = 1200 * millisecond;
constexpr int64_t gather_step = 300 * millisecond;
constexpr int64_t begun_limit = 1400 * millisecond;
constexpr int64_t note_time = 800 * millisecond;
constexpr int64_t settle_limit = 2500 * millisecond;
constexpr int64_t settle_step = 100 * millisecond;

}  // namespace

void Relay::look_after_failure() {
  const int64_t since = monotonic_nanoseconds() - run_.header().failed_time;
  for (Peer& peer : peers_) {
    if (peer.host_index >= 0 && !peer.failure) tell_failure(peer);
  }
  gather(since);
  settle(since);
}

void Relay::tell_failure(Peer& peer) {
  const RunHeader& header = run_.header();
  tell_names(peer);
  Failure failure{header.failed_rank, {}};
  copy_string(failure.reason, sizeof(failure.reason), header.reason);
  peer.link->send(MessageType::failure, failure);
  if (&peer == parent_) tell_whereabouts(run_, *peer.link);
  peer.failure = true;
}

void Relay::tell_begun(Peer& peer, const std::vector<BegunRange>& runs) {
  for (const BegunRange& run : runs) peer.link->send(MessageType::begun_range, run);
  peer.link->send(MessageType::begun_end);
}

/// Gathers the collectives that ranks here and below had begun; the centre publishes those of all ranks, a host that is cut
/// off from the centre those of the hosts below it.
void Relay::gather(int64_t since) {
  const bool alone = parent_ == nullptr || parent_->bye;
  const bool here = all_children([](const Peer& peer) { return peer.told || peer.bye; });
  if (!gathered_ && (here || since > gather_limit - depth_ * gather_step)) {
    gathered_ = true;
    const std::vector<BegunRange> own = begun_here(run_);
    begun_below_.insert(begun_below_.end(), own.begin(), own.end());
    begun_below_ = merged(std::move(begun_below_));
    if (!alone) tell_begun(*parent_, begun_below_);
  }
  if (mirrored_at_ != 0) return;
  if (!alone && parent_->told) publish(begun_);
  else if (gathered_ && (alone || since > begun_limit)) publish(begun_below_);
}

void Relay::publish(const std::vector<BegunRange>& runs) {
  publish_begun(run_, runs);
  run_.header().mirrored = 1;
  mirrored_at_ = monotonic_nanoseconds();
  for (Peer& peer : peers_) {
    if (is_child(peer)) tell_begun(peer, runs);
  }
}

/// Raises `settled` when the hosts below have told their ranks' notes, and the parent has been told all.
void Relay::settle(int64_t since) {
  if (mirrored_at_ == 0 || run_.header().settled != 0) return;
  const bool quiet = monotonic_nanoseconds() - mirrored_at_ > note_time;
  if (parent_ != nullptr && quiet && !noted_) {
    tell_whereabouts(run_, *parent_->link);
    noted_ = true;
  }
  const bool below = all_children([](const Peer& peer) { return peer.noted || peer.bye; });
  const bool late = since > settle_limit - depth_ * settle_step;
  if (parent_ != nullptr && noted_ && !parent_->noted && (below || late)) {
    parent_->link->send(MessageType::states_end);
    parent_->noted = true;
  }
  const bool unsent = std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return peer.host_index >= 0 && !peer.link->closed() && peer.link->has_unsent();
  });
  const bool done = quiet && below && (parent_ == nullptr || parent_->noted) && !unsent;
  if (done || since > settle_limit) run_.header().settled = 1;
}

}  // namespace mimo
