// The messages of relays about a rank, read from its region and written into the copy on another host.
#pragma once
#include "relay_link.h"
#include "run.h"

namespace mimo {

Beat beat_of(const Run& run, int32_t rank);
void take_beat(Run& run, const Beat& beat);

Name name_of(const Run& run, int32_t rank);
void take_name(Run& run, const Name& name);

/// Of every rank of this host.
void tell_whereabouts(const Run& run, Link& link);
void take_whereabouts(Run& run, const Whereabouts& told);

}  // namespace mimo
