#pragma once
#include "mimo.h"

namespace mimo {

/// Validates a router's arguments, for both libraries. Not inline, because kernel files include this: see require.h.
void require_valid(const mimo_router_forward_args& args);

}  // namespace mimo
