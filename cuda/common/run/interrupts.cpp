// SIGINT as a request to stop after the current step; a second SIGINT ends the process at once.
#include <errno.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>

#include "require.h"
#include "status.h"

namespace mimo {
namespace {

/// Nanoseconds within which two SIGINTs count as the same key press.
constexpr int64_t same_key_press = 500'000'000;

// The handler's state is global, since handlers take no arguments, and lock-free, since it may run at any instruction.
static_assert(std::atomic<int64_t>::is_always_lock_free);
/// Time of the first SIGINT; 0: not received.
std::atomic<int64_t> first_at{0};
char announcement[MIMO_INTERRUPT_SENTENCE_BYTES];
bool deferred = false;
struct sigaction before;

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

void on_interrupt(int) {
  const int64_t at = now();
  int64_t first = 0;
  if (first_at.compare_exchange_strong(first, at)) {
    // A failed write, as to a closed standard error, must not change errno for the interrupted code.
    const int error = errno;
    const ssize_t written = write(STDERR_FILENO, announcement, std::strlen(announcement));
    static_cast<void>(written);
    errno = error;
    return;
  }
  if (at - first < same_key_press) return;
  // The signal itself, delivered when this handler returns, has to end the process: shells and launchers distinguish that from
  // an exit.
  struct sigaction usual = {};
  usual.sa_handler = SIG_DFL;
  sigaction(SIGINT, &usual, nullptr);
  raise(SIGINT);
}

void defer_interrupts(const char* sentence) {
  MIMO_REQUIRE(!deferred, "mimo_interrupts_defer");
  const std::string text = sentence == nullptr ? "" : sentence;
  MIMO_REQUIRE(text.size() < MIMO_INTERRUPT_SENTENCE_BYTES, "mimo_interrupts_defer");
  std::memcpy(announcement, text.c_str(), text.size() + 1);
  first_at = 0;
  struct sigaction ours = {};
  ours.sa_handler = on_interrupt;
  ours.sa_flags = SA_RESTART;
  if (sigaction(SIGINT, &ours, &before) != 0) throw Error(MIMO_ERROR_UNSUPPORTED, "The system refused a handler of SIGINT.");
  deferred = true;
}

void restore_interrupts() {
  if (!deferred) return;
  sigaction(SIGINT, &before, nullptr);
  deferred = false;
}

}  // namespace
}  // namespace mimo

extern "C" {

int32_t mimo_interrupts_defer(const char* sentence) {
  return mimo::guard([&] { mimo::defer_interrupts(sentence); });
}

int32_t mimo_interrupts_asked(int32_t* asked) {
  return mimo::guard([&] {
    MIMO_REQUIRE(asked != nullptr, "mimo_interrupts_asked");
    *asked = mimo::first_at != 0;
  });
}

int32_t mimo_interrupts_restore(void) {
  return mimo::guard([] { mimo::restore_interrupts(); });
}

}  // extern "C"
