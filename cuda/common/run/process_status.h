// State of a process, read from /proc.
#pragma once
#include <cstdint>
#include <string>

namespace mimo {

struct ProcessStatus {
  char state = 0;           // 'T' stopped, 'Z' zombie; 0: no such process
  int64_t start_time = 0;   // clock ticks since boot; distinguishes processes that had the same id
  int32_t wait_status = 0;  // of a zombie, as in wait(); 0 also without the permission to read it
};

ProcessStatus read_process_status(int32_t pid);

/// How a process in this state has ended: "it was killed by SIGKILL".
std::string describe_exit(const ProcessStatus& process);

/// Kills process `pid` if it is still the process with this start time.
void kill_process(int32_t pid, int64_t start_time);

}  // namespace mimo
