#include "status.h"

namespace mimo {
namespace {
thread_local std::string last_error;
}

void set_last_error(const std::string& sentence) { last_error = sentence; }

void fail(int32_t status, const char* sentence) { throw Error(status, sentence); }

}  // namespace mimo

extern "C" const char* mimo_last_error(void) { return mimo::last_error.c_str(); }
extern "C" int32_t mimo_abi_version(void) { return MIMO_ABI_VERSION; }
