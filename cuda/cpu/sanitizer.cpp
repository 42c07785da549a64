// AddressSanitizer build only: lets C++ exceptions pass through Bun. Before a throw the sanitizer clears the shadow of
// the thread's alternate signal stack and insists on its alignment; Bun's main thread has an unaligned one.
#if defined(__SANITIZE_ADDRESS__)
#include <signal.h>

#include <cstdint>

namespace {

constexpr uintptr_t alignment = 64;

__attribute__((constructor)) void align_signal_stack() {
  stack_t stack;
  if (sigaltstack(nullptr, &stack) != 0 || (stack.ss_flags & (SS_DISABLE | SS_ONSTACK)) != 0) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(stack.ss_sp);
  const uintptr_t aligned = (begin + alignment - 1) / alignment * alignment;
  stack.ss_size = (stack.ss_size - (aligned - begin)) / alignment * alignment;
  stack.ss_sp = reinterpret_cast<void*>(aligned);
  sigaltstack(&stack, nullptr);
}

}  // namespace
#endif
