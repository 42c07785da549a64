#include "process_status.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace mimo {
namespace {

/// Numbers of system calls that headers of older systems lack, the same on every architecture.
constexpr long pidfd_send_signal_call = 424;
constexpr long pidfd_open_call = 434;
/// Fields of /proc/PID/stat, counted from the state, which follows the name.
constexpr int start_time_field = 22 - 3;
constexpr int wait_status_field = 52 - 3;

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

ProcessStatus read_process_status(int32_t pid) {
  ProcessStatus process;
  char path[64], text[1024];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  FILE* file = std::fopen(path, "re");
  if (file == nullptr) return process;
  const size_t length = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  text[length] = 0;
  // "pid (name) S ...": the name may contain parentheses, so the last one ends it.
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] != ' ') return process;
  at += 2;
  process.state = *at;
  for (int field = 0; at != nullptr; ++field) {
    if (field == start_time_field) process.start_time = std::strtoll(at, nullptr, 10);
    if (field == wait_status_field) process.wait_status = static_cast<int32_t>(std::strtol(at, nullptr, 10));
    at = std::strchr(at, ' ');
    if (at != nullptr) ++at;
  }
  return process;
}

std::string describe_exit(const ProcessStatus& process) {
  if (process.state == 'Z' && WIFSIGNALED(process.wait_status)) {
    return "it was killed by " + signal_name(WTERMSIG(process.wait_status));
  }
  if (process.state == 'Z' && WIFEXITED(process.wait_status) && WEXITSTATUS(process.wait_status) != 0) {
    return "it ended with exit code " + std::to_string(WEXITSTATUS(process.wait_status));
  }
  return "its process has ended";
}

void kill_process(int32_t pid, int64_t start_time) {
  // A pidfd refers to the same process even if its id is reused; without pidfds another process could get the signal.
  const auto handle = static_cast<int>(syscall(pidfd_open_call, pid, 0));
  if (handle < 0) return;
  if (read_process_status(pid).start_time == start_time) syscall(pidfd_send_signal_call, handle, SIGKILL, nullptr, 0);
  close(handle);
}

}  // namespace mimo
