// Exchange between relays after a failure: the failure, the collectives that ranks had begun, and the ranks they waited for.
#include <unistd.h>

#include <algorithm>

#include "rank_state.h"
#include "relay.h"

namespace mimo {
namespace {

// Times since the failure. A host waits for the hosts below it one step less than its parent waits for it.
constexpr int64_t gather_timeout = 1200 * millisecond;  // BegunRanges of the hosts below
constexpr int64_t gather_step = 300 * millisecond;
constexpr int64_t publish_timeout = 1400 * millisecond;  // BegunRanges of the whole run
constexpr int64_t settle_timeout = 2500 * millisecond;   // final states of the ranks below
constexpr int64_t settle_step = 100 * millisecond;
/// Time for ranks to record the missing ranks, once they know the BegunRanges.
constexpr int64_t record_time = 800 * millisecond;

}  // namespace

void Relay::exchange_after_failure() {
  const int64_t since = monotonic_nanoseconds() - run_.header().failed_time;
  for (Peer& peer : peers_) {
    if (peer.host_index >= 0 && !peer.failure_sent) send_failure(peer);
  }
  gather_begun(since);
  settle(since);
}

void Relay::send_failure(Peer& peer) {
  const RunHeader& header = run_.header();
  send_identities(peer);
  Failure failure{header.failed_rank, {}};
  copy_string(failure.reason, sizeof(failure.reason), header.reason);
  peer.link->send(MessageType::failure, failure);
  if (&peer == parent_) send_rank_states(run_, *peer.link);
  peer.failure_sent = true;
}

void Relay::send_begun(Peer& peer, const std::vector<BegunRange>& ranges) {
  for (const BegunRange& range : ranges) peer.link->send(MessageType::begun_range, range);
  peer.link->send(MessageType::begun_end);
}

/// Gathers the collectives that ranks of this host and of hosts below had begun, and publishes those of the whole run when they
/// arrive from the root. A host without a parent, or whose connection to it is lost, publishes what it has gathered.
void Relay::gather_begun(int64_t since) {
  const bool top = parent_ == nullptr || parent_->finished;
  const bool received = all_children([](const Peer& peer) { return peer.begun_end || peer.finished; });
  if (!begun_gathered_ && (received || since > gather_timeout - depth_ * gather_step)) {
    begun_gathered_ = true;
    const std::vector<BegunRange> own = local_begun(run_);
    begun_below_.insert(begun_below_.end(), own.begin(), own.end());
    begun_below_ = merged(std::move(begun_below_));
    if (!top) send_begun(*parent_, begun_below_);
  }
  if (begun_published_at_ != 0) return;
  if (!top && parent_->begun_end) publish_begun(begun_);
  else if (begun_gathered_ && (top || since > publish_timeout)) publish_begun(begun_below_);
}

void Relay::publish_begun(const std::vector<BegunRange>& ranges) {
  store_begun(run_, ranges);
  run_.header().begun_known = 1;
  begun_published_at_ = monotonic_nanoseconds();
  for (Peer& peer : peers_) {
    if (is_child(peer)) send_begun(peer, ranges);
  }
}

/// Sends the final states of this host's ranks, and sets `settled` when those of all hosts below have been received and sent on.
void Relay::settle(int64_t since) {
  if (begun_published_at_ == 0 || run_.header().settled != 0) return;
  const bool recorded = monotonic_nanoseconds() - begun_published_at_ > record_time;
  if (parent_ != nullptr && recorded && !final_states_sent_) {
    send_rank_states(run_, *parent_->link);
    final_states_sent_ = true;
  }
  const bool below = all_children([](const Peer& peer) { return peer.states_end || peer.finished; });
  const bool late = since > settle_timeout - depth_ * settle_step;
  if (parent_ != nullptr && final_states_sent_ && !parent_->states_end && (below || late)) {
    parent_->link->send(MessageType::states_end);
    parent_->states_end = true;
  }
  const bool unsent = std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return peer.host_index >= 0 && !peer.link->closed() && peer.link->has_unsent();
  });
  const bool done = recorded && below && (parent_ == nullptr || parent_->states_end) && !unsent;
  if (done || since > settle_timeout) run_.header().settled = 1;
}

}  // namespace mimo
