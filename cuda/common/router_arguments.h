#pragma once
#include "mimo.h"

namespace mimo {

/// Checks of a router's arguments, for both libraries. Not inline, for kernel files: see require.h.
void require_valid(const mimo_router_forward_args& args);

}  // namespace mimo
