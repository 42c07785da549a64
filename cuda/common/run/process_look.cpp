#include "process_look.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace mimo {
namespace {

/// System calls that headers of older systems lack; their numbers are those of every architecture.
constexpr long pidfd_send_signal_call = 424;
constexpr long pidfd_open_call = 434;
/// Fields of /proc/PID/stat behind the name, from the state on.
constexpr int started_field = 22 - 3;
constexpr int status_field = 52 - 3;

std::string signal_name(int number) {
  switch (number) {
    case SIGABRT: return "SIGABRT";
    case SIGBUS: return "SIGBUS";
    case SIGFPE: return "SIGFPE";
    case SIGHUP: return "SIGHUP";
    case SIGILL: return "SIGILL";
    case SIGINT: return "SIGINT";
    case SIGKILL: return "SIGKILL";
    case SIGPIPE: return "SIGPIPE";
    case SIGQUIT: return "SIGQUIT";
    case SIGSEGV: return "SIGSEGV";
    case SIGTERM: return "SIGTERM";
    case SIGTRAP: return "SIGTRAP";
    case SIGXCPU: return "SIGXCPU";
    case SIGXFSZ: return "SIGXFSZ";
    default: return "signal " + std::to_string(number);
  }
}

}  // namespace

ProcessLook look_at_process(int32_t pid) {
  ProcessLook look;
  char path[64], text[1024];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  FILE* file = std::fopen(path, "re");
  if (file == nullptr) return look;
  const size_t length = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  text[length] = 0;
  // "pid (name) S ...": the name may hold anything, so the last parenthesis counts.
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] != ' ') return look;
  at += 2;
  look.state = *at;
  for (int field = 0; at != nullptr; ++field) {
    if (field == started_field) look.started = std::strtoll(at, nullptr, 10);
    if (field == status_field) look.status = static_cast<int32_t>(std::strtol(at, nullptr, 10));
    at = std::strchr(at, ' ');
    if (at != nullptr) ++at;
  }
  return look;
}

std::string manner_of_death(const ProcessLook& look) {
  if (look.state == 'Z' && WIFSIGNALED(look.status)) return "it was killed by " + signal_name(WTERMSIG(look.status));
  if (look.state == 'Z' && WIFEXITED(look.status) && WEXITSTATUS(look.status) != 0) {
    return "it ended with exit code " + std::to_string(WEXITSTATUS(look.status));
  }
  return "its process has ended";
}

void kill_process(int32_t pid, int64_t started) {
  // Where the system knows no such handles nothing says that the process that gets the signal is the one looked at.
  const auto handle = static_cast<int>(syscall(pidfd_open_call, pid, 0));
  if (handle < 0) return;
  if (look_at_process(pid).started == started) syscall(pidfd_send_signal_call, handle, SIGKILL, nullptr, 0);
  close(handle);
}

}  // namespace mimo
