// The messages of relays about a rank, read from its region and written into the copy on another host.
#pragma once
#include <vector>

#include "relay_link.h"
#include "run.h"

namespace mimo {

RankIdentity name_of(const Run& run, int32_t rank);
void take_name(Run& run, const RankIdentity& name);

/// Of every rank of this host.
void tell_whereabouts(const Run& run, Link& link);
void take_whereabouts(Run& run, const RankState& told);

/// Collectives that the ranks of this host had begun in groups with members on other hosts.
std::vector<BegunRange> begun_here(const Run& run);
/// Joins runs of neighbours that had begun the same.
std::vector<BegunRange> merged(std::vector<BegunRange> runs);
/// Writes them where ranks of this host look.
void publish_begun(Run& run, const std::vector<BegunRange>& runs);

/// Of two sets of ranks together.
ProgressSummary merged(const ProgressSummary& a, const ProgressSummary& b);
void store(const ProgressSummary& outlook, SharedProgress& to);

}  // namespace mimo
