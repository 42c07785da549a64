// How kernel files refuse: apart from status.h, so that the dozens of them parse no <string>.
#pragma once
#include <cstdint>

#include "mimo.h"

namespace mimo {

/// Throws an Error (status.h). For kernel files, which must not hold inline code of std::string or Error themselves:
/// compiled for AVX-512, the linker could give it to every processor.
[[noreturn]] void fail(int32_t status, const char* sentence);

}  // namespace mimo

/// Refuses an argument: a bug in the caller, named by operation and condition.
#define MIMO_REQUIRE(condition, operation)                                                     \
  do {                                                                                         \
    if (!(condition)) ::mimo::fail(MIMO_ERROR_ARGUMENT, operation " needs " #condition "."); \
  } while (0)
