// Argument checks for kernel files; separate from status.h so that dozens of them need not parse <string>.
#pragma once
#include <cstdint>

#include "mimo.h"

namespace mimo {

/// Throws an Error (status.h). Kernel files must not contain inline code of std::string or Error: the linker could
/// merge their AVX-512 version into code for every processor.
[[noreturn]] void fail(int32_t status, const char* sentence);

}  // namespace mimo

/// Throws for an invalid argument, which is a bug in the caller, with the operation and the condition.
#define MIMO_REQUIRE(condition, operation)                                                     \
  do {                                                                                         \
    if (!(condition)) ::mimo::fail(MIMO_ERROR_ARGUMENT, operation " needs " #condition "."); \
  } while (0)
