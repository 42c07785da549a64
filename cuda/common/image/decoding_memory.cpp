// The budget behind DecodingMemory. Threads of a process share the library, and with it this state.
#include "decoding_memory.h"

#include <condition_variable>
#include <mutex>

#include "status.h"

namespace mimo {
namespace {

struct Budget {
  std::mutex mutex;
  std::condition_variable changed;
  int64_t limit = int64_t{1} << 30;
  int64_t used = 0;
  /// Shares are given in the order in which they were asked for, so that a large image does not wait for ever.
  uint64_t next_ticket = 0;
  uint64_t served = 0;
};

Budget& budget() {
  static Budget one;
  return one;
}

}  // namespace

DecodingMemory::DecodingMemory(int64_t bytes) : bytes_(bytes) {
  Budget& all = budget();
  std::unique_lock lock(all.mutex);
  const uint64_t ticket = all.next_ticket++;
  all.changed.wait(lock, [&] {
    return ticket == all.served && (all.used == 0 || all.used + bytes <= all.limit);
  });
  ++all.served;
  all.used += bytes;
  all.changed.notify_all();
}

DecodingMemory::~DecodingMemory() {
  Budget& all = budget();
  const std::lock_guard lock(all.mutex);
  all.used -= bytes_;
  all.changed.notify_all();
}

}  // namespace mimo

extern "C" int32_t mimo_image_memory(int64_t bytes) {
  return mimo::guard([&] {
    MIMO_REQUIRE(bytes > 0, "mimo_image_memory");
    mimo::Budget& all = mimo::budget();
    const std::lock_guard lock(all.mutex);
    all.limit = bytes;
    all.changed.notify_all();
  });
}
