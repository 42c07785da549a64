#pragma once
#include "mimo.h"

namespace mimo {

/// What both libraries ask of a router's arguments. Not inline, for kernel files: see require.h.
void require_valid(const mimo_router_forward_args& args);

}  // namespace mimo
