// The messages of relays about a rank, read from its region and written into the copy on another host.
#pragma once
#include <vector>

#include "relay_link.h"
#include "run.h"

namespace mimo {

Name name_of(const Run& run, int32_t rank);
void take_name(Run& run, const Name& name);

/// Of every rank of this host.
void tell_whereabouts(const Run& run, Link& link);
void take_whereabouts(Run& run, const Whereabouts& told);

/// Collectives that the ranks of this host had begun in groups with members on other hosts.
std::vector<BegunRun> begun_here(const Run& run);
/// Joins runs of neighbours that had begun the same.
std::vector<BegunRun> merged(std::vector<BegunRun> runs);
/// Writes them where ranks of this host look.
void publish_begun(Run& run, const std::vector<BegunRun>& runs);

/// Of two sets of ranks together.
Outlook merged(const Outlook& a, const Outlook& b);
void store(const Outlook& outlook, SharedOutlook& to);

}  // namespace mimo
