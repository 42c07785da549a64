// Messages between relays about ranks: made from the shared file of a rank's host, and stored in that of another host.
#pragma once
#include <vector>

#include "relay_link.h"
#include "run.h"

namespace mimo {

RankIdentity identity_of(const Run& run, int32_t rank);
void store_identity(Run& run, const RankIdentity& identity);

/// Sends the state of every rank of this host.
void send_rank_states(const Run& run, Link& link);
void store_rank_state(Run& run, const RankState& state);

/// The latest collectives that ranks of this host have begun in groups with members on other hosts.
std::vector<BegunRange> local_begun(const Run& run);
/// Joins ranges of consecutive ranks that have begun the same collective.
std::vector<BegunRange> merged(std::vector<BegunRange> ranges);
/// Writes the ranges of the whole run to this host's shared file.
void store_begun(Run& run, const std::vector<BegunRange>& ranges);

/// Progress of the union of two disjoint sets of ranks.
ProgressSummary merged(const ProgressSummary& a, const ProgressSummary& b);
void store(const ProgressSummary& summary, SharedProgress& to);

}  // namespace mimo
